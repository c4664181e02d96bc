// Stored features on a device: fetched whole or as a delta, verified, stored, and read with their expiry.
//
// For iOS from 15, macOS from 12, and Linux with swift-crypto. Isthmus describes the files in docs/snapshots.md.

import Foundation

#if canImport(CryptoKit)
import CryptoKit
#else
import Crypto
#endif
#if canImport(FoundationNetworking)
import FoundationNetworking
#endif

private let tags: [String: Character] = ["Bool": "b", "Int32": "i", "Int64": "i", "UnixTimestamp": "t", "String": "s", "Bytes": "y"]
private let widths = ["Bool": 1, "Int32": 4, "Int64": 8, "UnixTimestamp": 8, "Float32": 4, "Float64": 8]
private let signatureSize = 64
private let largest = 1 << 26
private let slack: Int64 = 300_000_000

/// The reason a snapshot is refused or cannot be used, in a sentence. `kind` is for programs.
public struct SnapshotError: LocalizedError {
    public let kind: String
    public let message: String
    public var errorDescription: String? { message }
}

/// What a device stores to feed a model: the `device` of a package's manifest. `age` and `ttl` are in microseconds. Of the
/// join key `owner` a device has one value.
public struct Device: Decodable, Sendable {
    /// A view of which a device has rows: join keys and features, each with its type.
    public struct View: Decodable, Sendable {
        let name: String, keys: [[String]], fields: [[String]], ttl: Int64?
    }

    let project: String, service: String, hash: String, age: Int64, views: [View], owner: String?

    /// From the bytes of the package's manifest.json.
    public init(manifest: Data) throws {
        struct Manifest: Decodable { let device: Device }
        self = try JSONDecoder().decode(Manifest.self, from: manifest).device
    }
}

/// A value of a feature; those of a UnixTimestamp are microseconds since 1970 UTC.
public enum FeatureValue: Equatable, Sendable {
    case bool(Bool), int32(Int32), int64(Int64), float(Float), double(Double), string(String), bytes([UInt8]), array([FeatureValue])
}

/// A value of a join key.
public enum KeyValue: Equatable, Sendable {
    case bool(Bool), int(Int64), string(String), bytes([UInt8])
}

/// A row of a view; `event` and `known` are microseconds since 1970 UTC.
public struct Row: Sendable {
    public enum Status: String, Sendable { case present, null, expired, notFound = "not_found" }

    public let status: Status
    public let event: Int64?
    public let known: Int64?
    /// Each feature by its name; nil where it has no value.
    public let values: [String: FeatureValue?]
}

/// The snapshots of a model's service on this device. Several threads may use it.
public final class Snapshots: @unchecked Sendable {
    private let device: Device, url: String, signer: P256.Signing.PublicKey, file: URL, files: Bool, owner: Owner?
    private let headers: [String: String], now: @Sendable () -> Int64, layouts: [String: Layout]
    private let lock = NSLock()
    private var stateNow: Snapshot?, problemNow: SnapshotError?

    /// What this device has stored, if it is sound; `update` fetches.
    ///
    /// - Parameters:
    ///   - device: of the manifest of the package.
    ///   - url: of the snapshot: a server's, or that of a file.
    ///   - key: whose owner must have signed it: a public key in PEM.
    ///   - folder: for the last good snapshot, which is checked when it is opened; created if it is missing.
    ///   - files: whether differences are files beside it, as `isthmus features snapshot --to` writes them.
    ///   - headers: of every request, such as an API key.
    ///   - owner: the value of the join key that the device names as owner, whose rows it has; only where it names one.
    ///   - now: the time in microseconds since 1970 UTC.
    public init(
        device: Device, url: String, key: String, folder: URL, files: Bool = false, headers: [String: String] = [:],
        owner value: KeyValue? = nil, now: @escaping @Sendable () -> Int64 = { Int64(Date().timeIntervalSince1970 * 1e6) }
    ) throws {
        let owner = try ownerOf(device, value)
        // After a change of user, the previous user's snapshot is neither used nor in the way.
        let name = ([device.project, device.service, device.hash] + (owner.map { [$0.text] } ?? [])).joined(separator: "/")
        (self.device, self.files, self.headers, self.now, self.owner) = (device, files, headers, now, owner)
        self.url = owner.map { "\(url)/\(encoded($0.text))" } ?? url
        signer = try P256.Signing.PublicKey(pemRepresentation: key)
        file = folder.appendingPathComponent(hex(SHA256.hash(data: Data(name.utf8))) + ".snapshot")
        layouts = Dictionary(uniqueKeysWithValues: device.views.map { ($0.name, Layout($0)) })
        adopt()
    }

    /// The reason the last fetched or stored snapshot was refused; the previous valid one stays in use.
    public var problem: SnapshotError? { locked { problemNow } }

    /// SHA-256 of the snapshot in use, in hexadecimal; nil if there is none.
    public var digest: String? { state?.digest }

    /// Microseconds since the snapshot in use was made; nil if there is none.
    public var age: Int64? { state.map { now() &- $0.made } }

    /// Fetches what is newer, and returns whether there was something.
    ///
    /// Throws a `SnapshotError`, why something newer is not in use; then this device goes on with what it has.
    @discardableResult
    public func update() async throws -> Bool {
        try await inTurn { try await self.fetched().map(self.take) ?? false }
    }

    /// Uses a snapshot, or a delta from the current one, that came with the app or was pushed.
    @discardableResult
    public func accept(_ data: Data) async throws -> Bool {
        try await inTurn { try self.take(self.whole([UInt8](data))) }
    }

    /// Throws a `SnapshotError` unless the snapshot in use may feed the model now.
    public func require() throws {
        guard let used = state else { throw problem ?? SnapshotError(kind: "none", message: "this device has no snapshot yet") }
        let at = now(), old = at &- used.made
        if old < -slack { throw ofTheFuture(used, at) }
        if old > device.age {
            let message = "the stored features are \(span(old)) old, of \(moment(used.made)); this model may use \(span(device.age))"
            throw SnapshotError(kind: "age", message: message)
        }
    }

    /// The row of a view for join keys, by name.
    public func row(_ view: String, _ keys: [String: KeyValue]) throws -> Row {
        guard let found = device.views.first(where: { $0.name == view }) else {
            throw SnapshotError(kind: "contract", message: "there is no view \(view)")
        }
        let used = state
        return try row(found, keys, used, present(of: used))
    }

    /// The stored features of a row of join keys, by the names of a model's inputs.
    public func features(_ keys: [String: KeyValue]) throws -> [String: FeatureValue?] {
        let used = state, at = present(of: used)
        var values: [String: FeatureValue?] = [:]
        for view in device.views {
            for (name, value) in try row(view, keys, used, at).values { values["\(view.name)__\(name)"] = .some(value) }
        }
        return values
    }

    private var state: Snapshot? { locked { stateNow } }

    /// The time of a read: the time of the snapshot if this device's clock is slightly behind it.
    private func present(of used: Snapshot?) -> Int64 {
        let at = now()
        guard let made = used?.made, at < made, made &- at <= slack else { return at }
        return made
    }

    private func locked<T>(_ work: () -> T) -> T {
        lock.lock()
        defer { lock.unlock() }
        return work()
    }

    private func row(_ view: Device.View, _ keys: [String: KeyValue], _ used: Snapshot?, _ at: Int64) throws -> Row {
        let layout = layouts[view.name]!, key = try keyOf(view, keys, owner)
        var values = Dictionary(uniqueKeysWithValues: layout.fields.map { ($0.name, FeatureValue?.none) })
        guard let bytes = used?.rows[view.name]?[key] else {
            return Row(status: .notFound, event: nil, known: nil, values: values)
        }
        let event: Int64 = little(bytes, 0), known: Int64 = little(bytes, 8)
        if event > at || known > at { return Row(status: .notFound, event: event, known: known, values: values) }
        // As a number without a sign, the difference of any two moments fits.
        if let ttl = view.ttl, UInt64(bitPattern: at &- event) > UInt64(ttl) {
            return Row(status: .expired, event: event, known: known, values: values)
        }
        for field in layout.fields { values[field.name] = .some(try layout.value(bytes, field)) }
        let status: Row.Status = values.values.allSatisfy { $0 == nil } ? .null : .present
        return Row(status: status, event: event, known: known, values: values)
    }

    /// Updates in this process run one at a time, so that none overwrites a newer snapshot.
    private func inTurn(_ work: @escaping @Sendable () async throws -> Bool) async throws -> Bool {
        try await Turns.shared.after { [self] in
            adopt()
            do {
                let newer = try await work()
                locked { problemNow = nil }
                return newer
            } catch {
                locked { problemNow = error as? SnapshotError }
                throw error
            }
        }
    }

    /// Loads the stored snapshot, which another process may have replaced.
    private func adopt() {
        guard FileManager.default.fileExists(atPath: file.path) else { return }
        do {
            let data = try Data(contentsOf: file)
            let fresh = try hex(SHA256.hash(data: data)) == digest ? nil : checked([UInt8](data), timely: false)
            locked { stateNow = fresh ?? stateNow }
        } catch {
            let unread = SnapshotError(kind: "store", message: "the stored snapshot cannot be read: \(error)")
            locked { problemNow = error as? SnapshotError ?? unread }
        }
    }

    /// Verifies that bytes are a snapshot for this device, not older than its current one. What is stored
    /// stays known whatever the clock says, so that nothing older can take its place.
    private func checked(_ bytes: [UInt8], timely: Bool = true) throws -> Snapshot {
        let end = max(bytes.count - signatureSize, 0)
        guard let signature = try? P256.Signing.ECDSASignature(rawRepresentation: bytes[end...]),
              signer.isValidSignature(signature, for: Data(bytes[..<end])) else {
            throw SnapshotError(kind: "signature", message: "the snapshot is not signed by the key of this model, or was altered since")
        }
        let fresh = try read(bytes, device, layouts, owner), at = now()
        if let had = state, fresh.number < had.number || (fresh.number == had.number && fresh.digest != had.digest) {
            let message = "the snapshot is of \(moment(fresh.made)); this device has had one of \(moment(had.made))"
            throw SnapshotError(kind: "older", message: message)
        }
        if timely, fresh.made > at &+ slack { throw ofTheFuture(fresh, at) }
        return fresh
    }

    @Sendable private func take(_ bytes: [UInt8]) throws -> Bool {
        try alone {
            // Another process may have stored something newer while this one fetched.
            adopt()
            let fresh = try checked(bytes)
            if fresh.digest == digest { return false }
            try store(Data(bytes))
            locked { stateNow = fresh }
            return true
        }
    }

    /// Runs work while no other process of the app does; the system ends the lock of a process that ends. Nothing is
    /// fetched meanwhile: iOS ends an app that holds a lock when it is suspended.
    private func alone<T>(_ work: () throws -> T) throws -> T {
        try? FileManager.default.createDirectory(at: file.deletingLastPathComponent(), withIntermediateDirectories: true)
        let turn = open(file.path + "-lock", O_CREAT | O_RDWR, 0o600)
        defer { close(turn) }
        guard turn >= 0, flock(turn, LOCK_EX) == 0 else {
            throw SnapshotError(kind: "store", message: "the new snapshot cannot be stored: \(String(cString: strerror(errno)))")
        }
        return try work()
    }

    /// Written beside and renamed: at any moment the file is the old one or the new one.
    private func store(_ data: Data) throws {
        let part = file.appendingPathExtension(UUID().uuidString)
        do {
            let disk = FileManager.default, folder = file.deletingLastPathComponent()
            try disk.createDirectory(at: folder, withIntermediateDirectories: true)
            // A killed process may have left a partial file.
            for left in try disk.contentsOfDirectory(atPath: folder.path) where left.hasPrefix(file.lastPathComponent + ".") {
                try? disk.removeItem(at: folder.appendingPathComponent(left))
            }
            try data.write(to: part)
            let written = try FileHandle(forWritingTo: part)
            try written.synchronize()
            try written.close()
            guard rename(part.path, file.path) == 0 else { throw POSIXError(POSIXErrorCode(rawValue: errno) ?? .EIO) }
        } catch {
            try? FileManager.default.removeItem(at: part)
            throw SnapshotError(kind: "store", message: "the new snapshot cannot be stored: \(error)")
        }
    }

    /// The bytes of what is newer; nil if nothing is.
    @Sendable private func fetched() async throws -> [UInt8]? {
        if let used = state {
            do {
                let place = files ? "\(url).\(used.digest.prefix(16))" : "\(url)?since=\(used.digest)"
                return try await ask(place, ["If-None-Match": "\"\(used.digest)\""]).map(whole)
            } catch let error as SnapshotError where error.kind != "offline" {
                // If the delta fails for any reason, fetch the whole file.
            }
        }
        return try await ask(url, [:])
    }

    private func whole(_ bytes: [UInt8]) throws -> [UInt8] {
        bytes.starts(with: "isthdiff".utf8) ? try applied(state?.bytes ?? [], bytes) : bytes
    }

    private func ask(_ place: String, _ more: [String: String]) async throws -> [UInt8]? {
        guard let place = URL(string: place) else { throw SnapshotError(kind: "refused", message: "\(place) is no URL") }
        var request = URLRequest(url: place, cachePolicy: .reloadIgnoringLocalCacheData, timeoutInterval: 30)
        for (name, value) in headers.merging(more, uniquingKeysWith: { $1 }) { request.setValue(value, forHTTPHeaderField: name) }
        let offline = SnapshotError(kind: "offline", message: "the snapshot cannot be fetched: there is no connection")
        #if canImport(FoundationNetworking)
        // On Linux there are no streams.
        let fetched = try? await URLSession.shared.data(for: request)
        #else
        let fetched = try? await URLSession.shared.bytes(for: request)
        #endif
        guard let (content, answer) = fetched, let status = (answer as? HTTPURLResponse)?.statusCode else { throw offline }
        if status == 304 { return nil }
        if !(200..<300).contains(status) { throw SnapshotError(kind: "refused", message: "the snapshot cannot be fetched: \(status)") }
        var bytes: [UInt8] = []
        #if canImport(FoundationNetworking)
        bytes += content
        #else
        do {
            for try await byte in content {
                bytes.append(byte)
                if bytes.count > largest { break }
            }
        } catch { throw offline }
        #endif
        if bytes.count > largest { throw SnapshotError(kind: "size", message: "the snapshot has more than \(largest) bytes") }
        return bytes
    }
}

private actor Turns {
    static let shared = Turns()
    private var last: Task<Bool, Error>?

    func after(_ work: @escaping @Sendable () async throws -> Bool) async throws -> Bool {
        let before = last
        let next = Task {
            _ = await before?.result
            return try await work()
        }
        last = next
        return try await next.value
    }
}

/// A checked snapshot: view to key to row.
private struct Snapshot {
    let bytes: [UInt8], digest: String, made: Int64, number: Int64, rows: [String: [[UInt8]: ArraySlice<UInt8>]]
}

/// Offsets in a row: two times, null bits, values of fixed width, then the ends of the other values.
private struct Layout {
    struct Field { let name: String, type: String, bit: Int, place: Int }

    let fields: [Field], ends: Int, others: Int, width: Int

    init(_ view: Device.View) {
        var place = 16 + (view.fields.count + 7) / 8, other = 0, fields: [Field] = []
        for (bit, field) in view.fields.enumerated() {
            let size = widths[field[1]]
            fields.append(Field(name: field[0], type: field[1], bit: bit, place: size == nil ? other : place))
            place += size ?? 0
            other += size == nil ? 1 : 0
        }
        (self.fields, ends, others, width) = (fields, place, other, place + 4 * other)
    }

    /// The value of a field; nil where it has none.
    func value(_ row: ArraySlice<UInt8>, _ field: Field) throws -> FeatureValue? {
        if row[row.startIndex + 16 + field.bit / 8] >> (field.bit % 8) & 1 == 1 { return nil }
        if widths[field.type] != nil { return fixed(row, field.place, field.type) }
        let begin: UInt32 = field.place == 0 ? 0 : little(row, ends + 4 * (field.place - 1))
        let end: UInt32 = little(row, ends + 4 * field.place)
        if begin > end || Int(end) > row.count - width { throw torn("the ends within a row are out of order") }
        let bytes = row.dropFirst(width + Int(begin)).prefix(Int(end - begin))
        guard field.type.hasPrefix("Array(") else { return try other(bytes, field.type) }
        return try .array(elements(bytes, String(field.type.dropFirst(6).dropLast())))
    }

    private func elements(_ bytes: ArraySlice<UInt8>, _ type: String) throws -> [FeatureValue] {
        var rest = bytes, items: [FeatureValue] = []
        while !rest.isEmpty {
            // Missing bytes of a length count as zeros, and then as missing.
            let size = widths[type] ?? 4 + Int(little(rest, 0) as UInt32)
            if size > rest.count { throw torn("an array ends within an element") }
            items.append(widths[type] == nil ? try other(rest.prefix(size).dropFirst(4), type) : fixed(rest, 0, type))
            rest = rest.dropFirst(size)
        }
        return items
    }

    private func other(_ bytes: ArraySlice<UInt8>, _ type: String) throws -> FeatureValue {
        if type == "Bytes" { return .bytes([UInt8](bytes)) }
        let text = String(decoding: bytes, as: UTF8.self)
        guard text.utf8.elementsEqual(bytes) else { throw torn("a text is not UTF-8") }
        return .string(text)
    }

    private func fixed(_ row: ArraySlice<UInt8>, _ place: Int, _ type: String) -> FeatureValue {
        switch type {
        case "Bool": return .bool(little(row, place) as UInt8 != 0)
        case "Int32": return .int32(little(row, place))
        case "Float32": return .float(Float(bitPattern: little(row, place)))
        case "Float64": return .double(Double(bitPattern: little(row, place)))
        default: return .int64(little(row, place))
        }
    }
}

private struct Header: Decodable {
    struct Count: Decodable {
        let view: String, rows: Int

        init(from decoder: Decoder) throws {
            var pair = try decoder.unkeyedContainer()
            (view, rows) = (try pair.decode(String.self), try pair.decode(Int.self))
        }
    }

    let project: String, service: String, hash: String, made: Int64, number: Int64, views: [Count], owner: [String]?
}

/// The owner of a device's snapshots: join key, value as text, and encoded value.
private struct Owner { let name: String, text: String, key: [UInt8] }

/// A file whose signature was checked, if it is a snapshot for this device.
private func read(_ bytes: [UInt8], _ device: Device, _ layouts: [String: Layout], _ owner: Owner?) throws -> Snapshot {
    let body = bytes.dropLast(signatureSize)
    guard body.count >= 13, body.starts(with: "isthsnap".utf8) else { throw torn("it does not begin as one") }
    if body[8] != 1 { throw SnapshotError(kind: "version", message: "the snapshot has version \(body[8]); expected 1") }
    let size = Int(little(body, 9) as UInt32)
    if size > body.count - 13 { throw torn("it ends within its header") }
    guard let header = try? JSONDecoder().decode(Header.self, from: Data(body.dropFirst(13).prefix(size))) else {
        throw torn("its header cannot be read")
    }
    let facts = [
        ("project", header.project, device.project), ("service", header.service, device.service), ("hash", header.hash, device.hash),
    ]
    for (name, found, expected) in facts where found != expected {
        let message = "the snapshot is of \(name) \(found.prefix(12)); this model was made for \(expected.prefix(12))"
        throw SnapshotError(kind: "contract", message: message)
    }
    let (found, expected) = (header.views.map(\.view).joined(separator: ", "), device.views.map(\.name).joined(separator: ", "))
    guard found == expected else {
        throw SnapshotError(kind: "contract", message: "the snapshot is of views \(found); expected \(expected)")
    }
    let has = header.owner ?? [], wanted = owner.map { [$0.name, $0.text] } ?? []
    guard same(has, wanted) else {
        throw SnapshotError(kind: "owner", message: "the snapshot is \(whose(has)); expected one \(whose(wanted))")
    }
    var rest = body.dropFirst(13 + size), rows: [String: [[UInt8]: ArraySlice<UInt8>]] = [:]
    for (view, count) in zip(device.views, header.views) {
        var found: [[UInt8]: ArraySlice<UInt8>] = [:]
        for _ in 0..<max(count.rows, 0) {
            let key = try rest.prefix(keySize(rest, view)), layout = layouts[view.name]!
            rest = rest.dropFirst(key.count)
            let width = layout.width + (layout.others > 0 ? Int(little(rest, layout.width - 4) as UInt32) : 0)
            if rest.count < width { throw torn("it ends within a row of \(view.name)") }
            found[[UInt8](key)] = rest.prefix(width)
            rest = rest.dropFirst(width)
        }
        rows[view.name] = found
    }
    if !rest.isEmpty { throw torn("it has another length than its header says") }
    return Snapshot(bytes: bytes, digest: hex(SHA256.hash(data: Data(bytes))), made: header.made, number: header.number, rows: rows)
}

private func keySize(_ bytes: ArraySlice<UInt8>, _ view: Device.View) throws -> Int {
    var size = 0
    for key in view.keys {
        let width = widths[key[1]].map { $0 == 1 ? 2 : 9 } ?? 5
        guard bytes.count >= size + width, bytes[bytes.startIndex + size] == tags[key[1]]?.asciiValue else {
            throw torn("no key of \(view.name) at byte \(bytes.startIndex)")
        }
        size += widths[key[1]] == nil ? width + Int(little(bytes, size + 1) as UInt32) : width
    }
    if size > bytes.count { throw torn("it ends within a key") }
    return size
}

private func whose(_ owner: [String]) -> String { owner.isEmpty ? "for all users" : "of \(owner.joined(separator: " "))" }

/// Whether texts have the same bytes: for Swift, letters that look alike are equal.
private func same(_ some: [String], _ others: [String]) -> Bool { some.map { [UInt8]($0.utf8) } == others.map { [UInt8]($0.utf8) } }

/// Encodes the key of a row: each join key in the order of the manifest.
private func keyOf(_ view: Device.View, _ keys: [String: KeyValue], _ owner: Owner?) throws -> [UInt8] {
    try view.keys.flatMap { key -> [UInt8] in
        let (name, type) = (key[0], key[1])
        guard let value = keys[name], value != .string("") else {
            throw SnapshotError(kind: "key", message: "\(view.name) needs the key \(name)")
        }
        let part = try partOf(name, type, value)
        // This device does not have these rows, so "not found" would be wrong.
        if let owner = owner, owner.name == name, owner.key != part {
            let message = "this device has the rows of \(name) \(owner.text) alone; it was asked for \(value)"
            throw SnapshotError(kind: "owner", message: message)
        }
        return part
    }
}

/// Encodes a join key in the key of a row.
private func partOf(_ name: String, _ type: String, _ found: KeyValue) throws -> [UInt8] {
    let value: [UInt8]
    switch (type, found) {
    case ("Bool", .bool(let truth)): value = [truth ? 1 : 0]
    case ("String", .string(let text)): value = bytes(UInt32(text.utf8.count)) + text.utf8
    case ("Bytes", .bytes(let data)): value = bytes(UInt32(data.count)) + data
    case ("Int32", .int(let whole)), ("Int64", .int(let whole)), ("UnixTimestamp", .int(let whole)): value = bytes(whole)
    default: throw SnapshotError(kind: "key", message: "the key \(name) is \(found); expected \(type)")
    }
    return [tags[type]!.asciiValue!] + value
}

/// Whose snapshots a device has; nil where all devices have the same.
private func ownerOf(_ device: Device, _ value: KeyValue?) throws -> Owner? {
    let own = value == .string("") ? nil : value
    guard let name = device.owner else {
        if own == nil { return nil }
        throw SnapshotError(kind: "owner", message: "the snapshots of \(device.service) are for all users; expected no owner")
    }
    guard let value = own, let type = device.views.flatMap(\.keys).first(where: { $0[0] == name })?[1] else {
        let message = "the snapshots of \(device.service) are of one \(name) each; expected that of this device as owner"
        throw SnapshotError(kind: "owner", message: message)
    }
    let text: String
    switch value {
    case .bool(let truth): text = "\(truth)"
    case .int(let whole): text = "\(whole)"
    case .string(let letters): text = letters
    case .bytes(let data): text = Data(data).base64EncodedString()
    }
    return try Owner(name: name, text: text, key: partOf(name, type, value))
}

private func encoded(_ text: String) -> String {
    let letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~"
    return text.addingPercentEncoding(withAllowedCharacters: CharacterSet(charactersIn: letters))!
}

/// Applies a delta to a file and returns the new file.
private func applied(_ base: [UInt8], _ delta: [UInt8]) throws -> [UInt8] {
    guard delta.count >= 77, delta[8] == 1 else { throw torn("what was fetched is no difference") }
    guard delta[9..<41].elementsEqual(SHA256.hash(data: Data(base))) else { throw torn("the difference is for another snapshot") }
    let size = Int(little(delta[...], 73) as UInt32)
    var made: [UInt8] = [], place = 77
    func number() throws -> Int {
        var value = 0
        for shift in stride(from: 0, to: 35, by: 7) where place < delta.count {
            value |= Int(delta[place] & 127) << shift
            place += 1
            if delta[place - 1] < 128 { return value }
        }
        throw torn("the difference ends within a number")
    }
    while place < delta.count {
        let step = try number(), count = step / 2
        let source = step % 2 == 1 ? base : delta, begin = step % 2 == 1 ? try number() : place
        place += step % 2 == 1 ? 0 : count
        if begin + count > source.count || made.count + count > min(size, largest) { throw torn("the difference leads beyond its end") }
        made += source[begin..<begin + count]
    }
    guard made.count == size, delta[41..<73].elementsEqual(SHA256.hash(data: Data(made))) else {
        throw torn("the difference does not lead to what it names")
    }
    return made
}

private func torn(_ why: String) -> SnapshotError {
    SnapshotError(kind: "torn", message: "the snapshot is torn or damaged: \(why)")
}

private func ofTheFuture(_ snapshot: Snapshot, _ at: Int64) -> SnapshotError {
    SnapshotError(kind: "clock", message: "the snapshot is of \(moment(snapshot.made)), and this device says it is \(moment(at))")
}

private func moment(_ micros: Int64) -> String {
    let text = ISO8601DateFormatter().string(from: Date(timeIntervalSince1970: Double(micros) / 1e6))
    return text.replacingOccurrences(of: "T", with: " ").replacingOccurrences(of: "Z", with: " UTC")
}

private func span(_ micros: Int64) -> String {
    let seconds = Double(micros) / 1e6
    let (unit, size) = [("days", 86400.0), ("hours", 3600), ("minutes", 60)].first { seconds >= 2 * $0.1 } ?? ("seconds", 1)
    return "\(Int((seconds / size).rounded())) \(unit)"
}

private func little<T: FixedWidthInteger>(_ bytes: ArraySlice<UInt8>, _ place: Int) -> T {
    bytes.dropFirst(place).prefix(T.bitWidth / 8).reversed().reduce(0) { $0 << 8 | T(truncatingIfNeeded: $1) }
}

private func bytes<T: FixedWidthInteger>(_ number: T) -> [UInt8] { withUnsafeBytes(of: number.littleEndian) { [UInt8]($0) } }

private func hex<Digest: Sequence>(_ digest: Digest) -> String where Digest.Element == UInt8 {
    digest.map { String(format: "%02x", $0) }.joined()
}
