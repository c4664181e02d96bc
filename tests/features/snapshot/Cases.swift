// Holds Snapshots.swift to tests/fixtures/snapshots.json, or does to a server's snapshots what it reads line by line.

import Foundation

typealias Json = [String: Any]

@main
struct Cases {
    static func main() async throws {
        let arguments = CommandLine.arguments
        let vectors = try Data(contentsOf: URL(fileURLWithPath: arguments[1]))
        let content = try JSONSerialization.jsonObject(with: vectors) as! Json
        let device = try Device(manifest: vectors), key = content["key"] as! String
        if arguments.count > 2 {
            let now = Int64(arguments[4])!
            return try await follow(Snapshots(device: device, url: arguments[2], key: key, folder: URL(fileURLWithPath: arguments[3]), now: { now }))
        }
        let files = (content["files"] as! [String: String]).mapValues { Data(base64Encoded: $0)! }
        var passed = 0, failed = 0
        func check(_ name: Any?, _ answer: Any, _ expected: Any) {
            if text(answer) == text(expected) { return passed += 1 }
            failed += 1
            print("\(name!): \(text(answer)); expected \(text(expected))")
        }
        for one in content["cases"] as! [Json] {
            let folder = FileManager.default.temporaryDirectory.appendingPathComponent(UUID().uuidString)
            let clock = Clock()
            let snapshots = try Snapshots(device: device, url: "http://127.0.0.1:1/", key: key, folder: folder, now: { clock.now })
            for step in one["steps"] as! [Json] {
                clock.now = Int64(step["now"] as! String)!
                check(one["name"], await answered { try await done(snapshots, device, step, files) }, step["answer"]!)
            }
            clock.now = 4_000_000_000_000_000
            let again = try Snapshots(device: device, url: "http://127.0.0.1:1/", key: key, folder: folder, now: { clock.now })
            check(one["name"], again.digest ?? "none", snapshots.digest ?? "none")
            try? FileManager.default.removeItem(at: folder)
        }
        print("\(passed) passed, \(failed) failed")
        exit(failed == 0 ? 0 : 1)
    }
}

final class Clock: @unchecked Sendable { var now: Int64 = 0 }

func text(_ value: Any) -> String {
    let data = try! JSONSerialization.data(withJSONObject: [value], options: [.sortedKeys])
    return String(decoding: data, as: UTF8.self)
}

func done(_ snapshots: Snapshots, _ device: Device, _ step: Json, _ files: [String: Data]) async throws -> Any {
    let types = Dictionary(uniqueKeysWithValues: device.views.flatMap(\.keys).map { ($0[0], $0[1]) })
    let keys = Dictionary(uniqueKeysWithValues: (step["keys"] as? [String: String] ?? [:]).map { ($0, key(types[$0]!, $1)) })
    switch step["do"] as! String {
    case "accept": return try await snapshots.accept(files[step["file"] as! String]!) ? "newer" : "same"
    case "require":
        try snapshots.require()
        return "fit"
    case "row":
        let row = try snapshots.row(step["view"] as! String, keys)
        func micros(_ time: Int64?) -> Any { time.map { String($0) } ?? NSNull() as Any }
        return ["status": row.status.rawValue, "event": micros(row.event), "known": micros(row.known), "values": row.values.mapValues(shown)]
    default: return try snapshots.features(keys).mapValues(shown)
    }
}

func key(_ type: String, _ text: String) -> KeyValue {
    switch type {
    case "Bytes": return .bytes(stride(from: 0, to: text.count, by: 2).map { UInt8(text.dropFirst($0).prefix(2), radix: 16)! })
    case "Bool": return .bool(text == "1")
    case "String": return .string(text)
    default: return Int64(text).map(KeyValue.int) ?? .string(text)
    }
}

func answered(_ work: () async throws -> Any) async -> Any {
    do { return try await work() } catch { return (error as? SnapshotError)?.kind ?? "\(error)" }
}

func shown(_ value: FeatureValue?) -> Any {
    func digits(_ bits: UInt64, _ count: Int) -> String {
        let text = String(bits, radix: 16)
        return String(repeating: "0", count: count - text.count) + text
    }
    switch value {
    case nil: return NSNull()
    case .bool(let truth): return truth ? "1" : "0"
    case .int32(let whole): return String(whole)
    case .int64(let whole): return String(whole)
    case .float(let number): return digits(UInt64(number.bitPattern), 8)
    case .double(let number): return digits(number.bitPattern, 16)
    case .string(let text): return text
    case .bytes(let data): return data.map { digits(UInt64($0), 2) }.joined()
    case .array(let items): return items.map(shown)
    }
}

func follow(_ snapshots: Snapshots) async {
    setvbuf(stdout, nil, _IOLBF, 0)
    print("digest \(snapshots.digest ?? "null") \(snapshots.problem?.kind ?? "null")")
    while let line = readLine() {
        let words = line.split(separator: " ").map(String.init)
        print(await answered {
            switch words[0] {
            case "update": return try await snapshots.update()
            case "forever": while true { try await snapshots.update() }
            case "at_once":
                try await withThrowingTaskGroup(of: Bool.self) { group in
                    for _ in 0..<8 { group.addTask { try await snapshots.update() } }
                    try await group.waitForAll()
                }
                return snapshots.digest ?? "null"
            case "require":
                try snapshots.require()
                return "fit"
            case "digest": return snapshots.digest ?? "null"
            default:
                let row = try snapshots.row("one", ["carrier": .string(words[1])])
                return "\(row.status.rawValue) \(plain(row.values["n"])) \(plain(row.values["text"]))"
            }
        })
    }
}

func plain(_ value: FeatureValue??) -> Any {
    let text = shown(value ?? nil)
    return text is NSNull ? "null" : text
}
