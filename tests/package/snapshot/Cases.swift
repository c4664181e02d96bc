// Holds Snapshots.swift to tests/fixtures/snapshots.json, or does to a server's snapshots what it reads line by line.

import Foundation

typealias Json = [String: Any]

@main
struct Cases {
    static func main() async throws {
        let arguments = CommandLine.arguments
        let vectors = try Data(contentsOf: URL(fileURLWithPath: arguments[1]))
        let content = try JSONSerialization.jsonObject(with: vectors) as! Json
        let device = try Device(manifest: vectors), pem = content["key"] as! String
        let manifests = content["manifests"] as! [String: String]
        if arguments.count > 2 {
            let now = Int64(arguments[4])!, own = arguments.count > 5 ? KeyValue.string(arguments[5]) : nil
            let mine = try own == nil ? device : Device(manifest: Data(manifests["carrier"]!.utf8))
            let folder = URL(fileURLWithPath: arguments[3])
            return try await follow(Snapshots(device: mine, url: arguments[2], key: pem, folder: folder, owner: own, now: { now }))
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
            let mine = try (one["of"] as? String).map { try Device(manifest: Data(manifests[$0]!.utf8)) } ?? device
            let type = device.views.flatMap(\.keys).first { $0[0] == mine.owner }?[1] ?? "String"
            func open(_ owner: String?) throws -> Snapshots {
                let value = owner.map { key(type, $0) }
                return try Snapshots(device: mine, url: "http://127.0.0.1:1/", key: pem, folder: folder, owner: value, now: { clock.now })
            }
            var whose = one["owner"] as? String, snapshots = try open(whose)
            for step in one["steps"] as! [Json] {
                clock.now = Int64(step["now"] as! String)!
                let answer: Any
                if step["do"] as! String == "open" {
                    do {
                        snapshots = try open(step["owner"] as? String)
                        whose = step["owner"] as? String
                        answer = "opened"
                    } catch { answer = (error as? SnapshotError)?.kind ?? "\(error)" }
                } else {
                    let opened = snapshots
                    answer = await answered { try await done(opened, device, step, files) }
                }
                check(one["name"], answer, step["answer"]!)
            }
            clock.now = 4_000_000_000_000_000
            let again = try open(whose)
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
