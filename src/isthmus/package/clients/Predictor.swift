// Predictions from keys and request fields, by the C API of ONNX Runtime: its API for Swift has no tensors of doubles. Add the
// pod `onnxruntime-c`, and `#import <onnxruntime_c_api.h>` in the app's bridging header.

import Foundation

public struct PredictorError: Error, CustomStringConvertible {
    public let description: String
}

private struct PackageManifest: Decodable {
    struct Input: Decodable { let name: String, dtype: String, tensor: String, size: Int? }
    struct Tensor: Decodable { let name: String, element: String }
    struct Variant: Decodable { let file: String, format: String, bytes: Int }

    let inputs: [Input], tensors: [Tensor], outputs: [Tensor], variants: [Variant], classes: [String]?
}

/// The smallest model of a package in ORT format.
public final class Predictor {
    private let manifest: PackageManifest, api: String?, key: String?
    private let ort: OrtApi
    private var environment: OpaquePointer?, session: OpaquePointer?
    private var allocator: UnsafeMutablePointer<OrtAllocator>?

    /// Opens the package in a folder of the app's bundle. `lookup` asks the address of `isthmus serve`, with an API key that has
    /// the scope `read:*` if the server asks for one.
    public init(package: URL, api: String? = nil, key: String? = nil) throws {
        (self.api, self.key) = (api, key)
        let data = try Data(contentsOf: package.appendingPathComponent("manifest.json"))
        manifest = try JSONDecoder().decode(PackageManifest.self, from: data)
        let models = manifest.variants.filter { $0.format == "ort" }
        guard let model = models.min(by: { $0.bytes < $1.bytes }), let api = OrtGetApiBase().pointee.GetApi(UInt32(ORT_API_VERSION)) else {
            throw PredictorError(description: "no model in ORT format, or another ONNX Runtime than the header's")
        }
        ort = api.pointee
        try check(ort.CreateEnv(ORT_LOGGING_LEVEL_WARNING, "isthmus", &environment))
        var options: OpaquePointer?
        try check(ort.CreateSessionOptions(&options))
        defer { ort.ReleaseSessionOptions(options) }
        try check(ort.CreateSession(environment, package.appendingPathComponent(model.file).path, options, &session))
        try check(ort.GetAllocatorWithDefaultOptions(&allocator))
    }

    deinit {
        ort.ReleaseSession(session)
        ort.ReleaseEnv(environment)
    }

    /// Predicts one row: the probability of each class by its name, or the number by the name of the output. Nil where a request
    /// feature is not defined for these values.
    ///
    /// `keys` has join keys, `request` the other inputs, and `stored` the stored features, of `lookup` or of a snapshot. A value is
    /// a number, a Bool, a String, or nil.
    public func predict(_ keys: [String: Any?], _ request: [String: Any?], stored: [String: Any?]) throws -> [String: Float]? {
        let row = keys.merging(request) { $1 }.merging(stored) { $1 }
        var names: [UnsafePointer<CChar>?] = [], values: [OpaquePointer?] = [], answers: [OpaquePointer?] = [nil]
        defer {
            names.forEach { free(UnsafeMutableRawPointer(mutating: $0)) }
            (values + answers).forEach { ort.ReleaseValue($0) }
        }
        for input in manifest.inputs where row[input.name] == nil {
            throw PredictorError(description: "no value for \(input.name); pass nil where there is none")
        }
        for tensor in manifest.tensors {
            values.append(try made(tensor, row))
            names.append(strdup(tensor.name).map { UnsafePointer($0) })
        }
        let output = manifest.outputs[0].name
        names.append(strdup(output).map { UnsafePointer($0) })
        try check(ort.Run(session, nil, names, values, values.count, [names[values.count]], 1, &answers))
        let labels = manifest.classes ?? [output]
        var data: UnsafeMutableRawPointer?
        try check(ort.GetTensorMutableData(answers[0], &data))
        let numbers = UnsafeBufferPointer(start: data!.assumingMemoryBound(to: Float.self), count: labels.count)
        if numbers.contains(where: { $0.isNaN }) { return nil }
        return Dictionary(uniqueKeysWithValues: zip(labels, numbers))
    }

    /// Fetches the stored features of these keys, nil where a key has no row or its row has expired.
    public func lookup(_ keys: [String: Any]) async throws -> [String: Any?] {
        let inputs = manifest.inputs.filter { $0.name.contains("__") }
        let types = Dictionary(inputs.map { ($0.name, $0.dtype) }, uniquingKeysWith: { first, _ in first })
        if types.isEmpty { return [:] }
        guard let url = URL(string: "\(api ?? "")/get-online-features") else { throw PredictorError(description: "no address to ask") }
        let features = types.keys.map { name -> String in
            let parts = name.range(of: "__")!
            return name.replacingCharacters(in: parts, with: ":")
        }
        let asked: [String: Any] = ["features": features, "entities": keys.mapValues { [$0] }, "full_feature_names": true]
        var request = URLRequest(url: url)
        request.httpMethod = "POST"
        request.httpBody = try JSONSerialization.data(withJSONObject: asked)
        if let key = key { request.setValue("Bearer \(key)", forHTTPHeaderField: "Authorization") }
        let (data, answer) = try await URLSession.shared.data(for: request)
        let status = (answer as? HTTPURLResponse)?.statusCode ?? 0
        guard status == 200, let found = try JSONSerialization.jsonObject(with: data) as? [String: Any],
              let metadata = found["metadata"] as? [String: Any], let names = metadata["feature_names"] as? [String],
              let results = found["results"] as? [[String: Any]]
        else { throw PredictorError(description: "lookup: \(status)") }
        var stored: [String: Any?] = [:]
        for (name, result) in zip(names, results) {
            guard let type = types[name], let value = (result["values"] as? [Any])?.first else { continue }
            // The API has seconds, the model microseconds.
            let seconds = type == "UnixTimestamp" ? value as? NSNumber : nil
            stored.updateValue(seconds.map { Int64(($0.doubleValue * 1e6).rounded()) as Any } ?? value, forKey: name)
        }
        return stored
    }

    /// A tensor of one row.
    private func made(_ tensor: PackageManifest.Tensor, _ row: [String: Any?]) throws -> OpaquePointer? {
        let given = manifest.inputs.filter { $0.tensor.hasPrefix("given_") }
        let taken = tensor.name == "given_valid" ? given : manifest.inputs.filter { $0.tensor == tensor.name }
        let values: [Any?] = try taken.flatMap { input -> [Any?] in
            let given = (row[input.name] ?? nil).flatMap { $0 is NSNull ? nil : $0 }
            if let size = input.size {
                let elements = given == nil ? [Any?](repeating: nil, count: size) : given as? [Any?] ?? []
                if elements.count != size { throw PredictorError(description: "\(input.name) has \(elements.count) elements, not \(size)") }
                return try elements.map { try cast($0, input) }
            }
            let value = try cast(given, input)
            return [tensor.name == "given_valid" ? (value == nil ? Int64(0) : Int64(1)) : value]
        }
        switch tensor.element {
        case "string":
            let value = try allocated([String](), ONNX_TENSOR_ELEMENT_DATA_TYPE_STRING, tensor, values.count)
            let texts = values.map { strdup(($0 as? String) ?? "") }
            defer { texts.forEach { free($0) } }
            try check(ort.FillStringTensor(value, texts.map { $0.map { UnsafePointer($0) } }, texts.count))
            return value
        case "float": return try allocated(values.map(float), ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, tensor, values.count)
        case "double":
            let doubles = values.map { ($0 as? Double) ?? .nan }
            return try allocated(doubles, ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, tensor, values.count)
        case "int64": return try allocated(values.map(whole), ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, tensor, values.count)
        case "int32":
            return try allocated(values.map { Int32(whole($0)) }, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, tensor, values.count)
        default:
            let type = tensor.element == "bool" ? ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL : ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8
            return try allocated(values.map { whole($0) == 0 ? UInt8(0) : UInt8(1) }, type, tensor, values.count)
        }
    }

    /// A tensor with its elements, in memory of the runtime; of texts it is filled afterwards.
    private func allocated<T>(
        _ elements: [T], _ type: ONNXTensorElementDataType, _ tensor: PackageManifest.Tensor, _ count: Int
    ) throws -> OpaquePointer? {
        let shape: [Int64] = tensor.name.hasPrefix("given_") ? [Int64(count), 1] : [1, Int64(count)]
        var value: OpaquePointer?
        try check(ort.CreateTensorAsOrtValue(allocator, shape, shape.count, type, &value))
        if !elements.isEmpty {
            var data: UnsafeMutableRawPointer?
            try check(ort.GetTensorMutableData(value, &data))
            data!.assumingMemoryBound(to: T.self).update(from: elements, count: count)
        }
        return value
    }

    private func check(_ status: OpaquePointer?) throws {
        guard let status = status else { return }
        defer { ort.ReleaseStatus(status) }
        throw PredictorError(description: String(cString: ort.GetErrorMessage(status)))
    }
}

private func whole(_ value: Any?) -> Int64 { (value as? Int64) ?? 0 }

private func float(_ value: Any?) -> Float {
    if let number = value as? Double { return Float(number) }
    return (value as? Int64).map { Float($0) } ?? .nan
}

/// A value as a String, a Double or an Int64; nil for null. A UnixTimestamp is whole microseconds since 1970 UTC.
private func cast(_ value: Any?, _ input: PackageManifest.Input) throws -> Any? {
    guard let value = value, !(value is NSNull) else { return nil }
    let words = ["NaN": Double.nan, "Infinity": .infinity, "-Infinity": -.infinity]
    let text = value as? String, number = value as? NSNumber
    switch input.dtype {
    case "String": if let text = text { return text }
    case "Float32", "Float64", "Array(Float32)": if let real = text.flatMap({ words[$0] }) ?? number?.doubleValue { return real }
    default:
        if let whole = number?.int64Value, Double(whole) == number?.doubleValue, input.dtype != "Int32" || Int32(exactly: whole) != nil {
            return whole
        }
    }
    throw PredictorError(description: "\(input.name) is \(value); expected a \(input.dtype)")
}
