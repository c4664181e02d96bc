// The runtime that is installed beside this file, for scripts elsewhere.
export * from "onnxruntime-web";
