// Computes the inputs of a numeric core: the steps of `head.json`, bit for bit. docs/heads.md describes the format.

import Foundation

/// The reason a head cannot be read, or a row cannot be computed.
public struct HeadError: Error, CustomStringConvertible {
    public let description: String
}

/// A value of a row. A text is in UTF-8: Swift's own texts are equal where their bytes are not.
public enum HeadValue: Equatable, Sendable {
    case float(Float), double(Double), int32(Int32), int64(Int64), bool(Bool), text([UInt8])

    public static func string(_ text: String) -> HeadValue { .text(Array(text.utf8)) }

    var asFloat: Float { if case .float(let value) = self { return value } else { return .nan } }
    var asDouble: Double { if case .double(let value) = self { return value } else { return .nan } }
    var asInt32: Int32 { if case .int32(let value) = self { return value } else { return 0 } }
    var asInt64: Int64 { if case .int64(let value) = self { return value } else { return 0 } }
    var asBool: Bool { if case .bool(let value) = self { return value } else { return false } }
    var asText: [UInt8] { if case .text(let value) = self { return value } else { return [] } }
}

/// What a core is fed for a row: values by name. Where the row is refused, a request feature is not defined for its
/// values, and the answer is NaN.
public struct HeadRow: Sendable {
    public let tensors: [String: [HeadValue]]
    public let refused: Bool

    /// A tensor of 32-bit numbers, such as `numbers`.
    public func floats(_ name: String) -> [Float] { tensors[name, default: []].map(\.asFloat) }

    /// A tensor of 32-bit whole numbers, such as `places`.
    public func int32s(_ name: String) -> [Int32] { tensors[name, default: []].map(\.asInt32) }
}

/// The head in `head.json`.
public struct Head: @unchecked Sendable {
    typealias Apply = (HeadValue, HeadValue, HeadValue) throws -> HeadValue
    private typealias Fill = ([String: HeadValue?]) throws -> HeadValue
    private struct Step { let apply: Apply, a: Int, b: Int, c: Int }

    private var inputs: [Fill] = []
    private var constants: [HeadValue] = []
    private var steps: [Step] = []
    private var outputs: [(name: String, slots: [Int])] = []
    private var refused: Int?

    /// The tensors in their order.
    public var names: [String] { outputs.map(\.name) }

    /// Throws a HeadError if the bytes are none, or of another version.
    public init(_ bytes: Data) throws {
        try check(bytes.count <= largest, "head.json has \(bytes.count) bytes; expected at most \(largest)")
        guard let form = try? JSONSerialization.jsonObject(with: bytes) as? [String: Any] else {
            throw HeadError(description: "head.json is not JSON")
        }
        let version = try item(form["version"], Int.self)
        try check(version == 1, "head.json has version \(version); expected 1")
        var types: [String] = []
        func place(_ slot: Int, _ element: String) throws -> Int {
            try check(types.indices.contains(slot), "slot \(slot) of \(types.count) is read")
            try check(types[slot] == element, "slot \(slot) holds \(types[slot]); expected \(element)")
            return slot
        }
        for parts in try item(form["inputs"], [[String]].self) {
            try check(parts.count == 3, "an input has \(parts.count) parts")
            let (fill, element) = try input(parts[0], parts[1], parts[2])
            inputs.append(fill)
            types.append(element)
        }
        for part in try item(form["constants"], [[Any]].self) {
            let (element, texts) = (try item(part.first, String.self), try item(part.last, [String].self))
            constants += try values(texts, element)
            types += Array(repeating: element, count: texts.count)
        }
        for group in try item(form["steps"], [[Any]].self) {
            try check((3...4).contains(group.count), "a group of steps has \(group.count) parts")
            let (name, element) = (try item(group[0], String.self), try item(group[1], String.self))
            let slots = try item(group[2], [Int].self)
            let of = try operation(name, element, group.count == 4 ? group[3] : nil)
            let size = of.operands.count
            try check(slots.count % size == 0, "\(name) takes \(size) operands, and gets \(slots.count)")
            try check(types.count + slots.count / size <= most, "more than \(most) slots")
            for begin in stride(from: 0, to: slots.count, by: size) {
                let places = try (0..<size).map { try place(slots[begin + $0], of.operands[$0]) }
                steps.append(Step(apply: of.apply, a: places[0], b: places[min(1, size - 1)], c: places[size - 1]))
                types.append(of.output)
            }
        }
        for output in try item(form["outputs"], [[Any]].self) {
            try check(output.count == 3, "an output has \(output.count) parts")
            let (name, element) = (try item(output[0], String.self), try item(output[1], String.self))
            try check(!outputs.contains { $0.name == name }, "two outputs have the name \(name)")
            outputs.append((name, try item(output[2], [Int].self).map { try place($0, element) }))
        }
        if !(form["refused"] is NSNull) { refused = try place(try item(form["refused"], Int.self), "bool") }
    }

    /// Computes the inputs of the core from a row of raw values, by the names of the model's inputs; nil for no value.
    ///
    /// A UnixTimestamp is in microseconds since 1970 UTC.
    public func row(_ values: [String: HeadValue?]) throws -> HeadRow {
        var slots = try inputs.map { try $0(values) }
        slots.reserveCapacity(slots.count + constants.count + steps.count)
        slots += constants
        for step in steps { slots.append(try step.apply(slots[step.a], slots[step.b], slots[step.c])) }
        let tensors = outputs.map { output in (output.name, output.slots.map { slots[$0] }) }
        return HeadRow(tensors: Dictionary(uniqueKeysWithValues: tensors), refused: refused.map { slots[$0].asBool } ?? false)
    }
}

private let largest = 1 << 24
private let most = 1 << 20
private let feast = [
    "Bool": "bool", "Int32": "int32", "Int64": "int64", "UnixTimestamp": "int64", "Float32": "float", "Float64": "double",
    "String": "string",
]
private let predicates = ["Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "IsNaN", "IsInf", "RegexFullMatch"]
private let unaries = ["Abs", "Neg", "Floor", "Ceil", "Round", "Sqrt", "Sign", "IsNaN", "IsInf", "BitwiseNot", "Not"]

private func check(_ holds: Bool, _ message: @autoclosure () -> String) throws {
    if !holds { throw HeadError(description: message()) }
}

private func item<T>(_ value: Any?, _ type: T.Type) throws -> T {
    guard let item = value as? T else { throw HeadError(description: "head.json has \(value ?? "nothing"); expected \(type)") }
    return item
}

/// The function of an operator, and the types of its operands and of its result.
private struct HeadOperation {
    let apply: Head.Apply
    let operands: [String]
    let output: String
}

private func operation(_ name: String, _ element: String, _ attribute: Any?) throws -> HeadOperation {
    func unary(_ operand: String, _ output: String, _ function: @escaping (HeadValue) throws -> HeadValue) -> HeadOperation {
        HeadOperation(apply: { value, _, _ in try function(value) }, operands: [operand], output: output)
    }
    switch name {
    case "Where":
        try check(feast.values.contains(element) && element != "bool", "no choice of \(element)")
        return HeadOperation(apply: { $0.asBool ? $1 : $2 }, operands: ["bool", element, element], output: element)
    case "Cast":
        let to = try item(attribute, String.self)
        guard let function = cast(element, to) else { throw HeadError(description: "no cast of \(element) to \(to)") }
        return unary(element, to, function)
    case "Gather":
        let table = try values(try item(attribute, [String].self), element)
        return unary("int64", element) { place in
            let number = place.asInt64 < 0 ? place.asInt64 + Int64(table.count) : place.asInt64
            guard let index = Int(exactly: number), table.indices.contains(index) else {
                throw HeadError(description: "a step reads beyond a table")
            }
            return table[index]
        }
    case "LabelEncoder":
        let parts = try item(attribute, [Any].self)
        try check((element == "string" || element == "int64") && parts.count == 3, "no vocabulary of \(element)")
        let keys = try item(parts[0], [String].self), places = try values(try item(parts[1], [String].self), "int64")
        let other = try values([try item(parts[2], String.self)], "int64")[0]
        try check(keys.count == places.count, "a vocabulary has a value for each key")
        if element == "string" {
            let vocabulary = Dictionary(zip(keys.map { Array($0.utf8) }, places), uniquingKeysWith: { $1 })
            return unary(element, "int64") { vocabulary[$0.asText] ?? other }
        }
        let numbers = try values(keys, element).map(\.asInt64)
        let vocabulary = Dictionary(zip(numbers, places), uniquingKeysWith: { $1 })
        return unary(element, "int64") { vocabulary[$0.asInt64] ?? other }
    case "StringNormalizer":
        let change = try item(attribute, String.self)
        try check(element == "string" && (change == "LOWER" || change == "UPPER"), "no change of case \(change)")
        let letters: ClosedRange<UInt8> = change == "LOWER" ? 65...90 : 97...122
        return unary(element, element) { value in .text(value.asText.map { letters.contains($0) ? $0 ^ 32 : $0 }) }
    case "RegexFullMatch":
        try check(element == "string", "no pattern of \(element)")
        if attribute as? String == "ascii" { return unary(element, "bool") { value in .bool(value.asText.allSatisfy { $0 < 128 }) } }
        let matches = try matcher(try item(attribute, [[String]].self))
        return unary(element, "bool") { .bool(matches($0.asText)) }
    default:
        guard attribute == nil, let apply = elementary(name, element) else {
            throw HeadError(description: "no operator \(name) of \(element)")
        }
        let operands = Array(repeating: element, count: unaries.contains(name) ? 1 : 2)
        return HeadOperation(apply: apply, operands: operands, output: predicates.contains(name) ? "bool" : element)
    }
}

private func elementary(_ name: String, _ element: String) -> Head.Apply? {
    switch element {
    case "float": return real(name, \.asFloat, HeadValue.float)
    case "double": return real(name, \.asDouble, HeadValue.double)
    case "int32": return whole(name, \.asInt32, HeadValue.int32)
    case "int64": return whole(name, \.asInt64, HeadValue.int64)
    case "bool":
        switch name {
        case "Equal": return { a, b, _ in .bool(a.asBool == b.asBool) }
        case "And": return { a, b, _ in .bool(a.asBool && b.asBool) }
        case "Or": return { a, b, _ in .bool(a.asBool || b.asBool) }
        case "Not": return { a, _, _ in .bool(!a.asBool) }
        default: return nil
        }
    case "string":
        switch name {
        case "Equal": return { a, b, _ in .bool(a.asText == b.asText) }
        case "StringConcat": return { a, b, _ in .text(a.asText + b.asText) }
        default: return nil
        }
    default: return nil
    }
}

private func compared<T: Comparable>(_ name: String, _ value: @escaping (HeadValue) -> T) -> Head.Apply? {
    switch name {
    case "Equal": return { a, b, _ in .bool(value(a) == value(b)) }
    case "Less": return { a, b, _ in .bool(value(a) < value(b)) }
    case "LessOrEqual": return { a, b, _ in .bool(value(a) <= value(b)) }
    case "Greater": return { a, b, _ in .bool(value(a) > value(b)) }
    case "GreaterOrEqual": return { a, b, _ in .bool(value(a) >= value(b)) }
    default: return nil
    }
}

private func real<T: BinaryFloatingPoint>(
    _ name: String, _ value: @escaping (HeadValue) -> T, _ made: @escaping (T) -> HeadValue
) -> Head.Apply? {
    func binary(_ function: @escaping (T, T) -> T) -> Head.Apply { { a, b, _ in made(function(value(a), value(b))) } }
    func unary(_ function: @escaping (T) -> T) -> Head.Apply { { a, _, _ in made(function(value(a))) } }
    switch name {
    case "Add": return binary { $0 + $1 }
    case "Sub": return binary { $0 - $1 }
    case "Mul": return binary { $0 * $1 }
    case "Div": return binary { $0 / $1 }
    case "Mod": return binary { $0.truncatingRemainder(dividingBy: $1) }
    case "Max": return binary { $0 > $1 || $0.isNaN ? $0 : $1 }
    case "Min": return binary { $0 < $1 || $0.isNaN ? $0 : $1 }
    case "Abs": return unary { $0.magnitude }
    case "Neg": return unary { -$0 }
    case "Floor": return unary { $0.rounded(.down) }
    case "Ceil": return unary { $0.rounded(.up) }
    case "Round": return unary { $0.rounded(.toNearestOrEven) }
    case "Sqrt": return unary { $0.squareRoot() }
    case "Sign": return unary { $0 > 0 ? 1 : $0 < 0 ? -1 : $0.isNaN ? $0 : 0 }
    case "IsNaN": return { a, _, _ in .bool(value(a).isNaN) }
    case "IsInf": return { a, _, _ in .bool(value(a).isInfinite) }
    default: return compared(name, value)
    }
}

private func whole<T: FixedWidthInteger & SignedInteger>(
    _ name: String, _ value: @escaping (HeadValue) -> T, _ made: @escaping (T) -> HeadValue
) -> Head.Apply? {
    func binary(_ function: @escaping (T, T) throws -> T) -> Head.Apply { { a, b, _ in made(try function(value(a), value(b))) } }
    func unary(_ function: @escaping (T) -> T) -> Head.Apply { { a, _, _ in made(function(value(a))) } }
    func divisor(_ number: T) throws -> T {
        try check(number != 0, "a step divides by zero")
        return number
    }
    switch name {
    case "Add": return binary { $0 &+ $1 }
    case "Sub": return binary { $0 &- $1 }
    case "Mul": return binary { $0 &* $1 }
    case "Div": return binary { try $0.dividedReportingOverflow(by: divisor($1)).partialValue }
    case "Mod":
        return binary { a, b in
            let rest = try a.remainderReportingOverflow(dividingBy: divisor(b)).partialValue
            return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest
        }
    case "Max": return binary { max($0, $1) }
    case "Min": return binary { min($0, $1) }
    case "Abs": return unary { $0 < 0 ? 0 &- $0 : $0 }
    case "Neg": return unary { 0 &- $0 }
    case "BitwiseAnd": return binary { $0 & $1 }
    case "BitwiseOr": return binary { $0 | $1 }
    case "BitwiseXor": return binary { $0 ^ $1 }
    case "BitwiseNot": return unary { ~$0 }
    default: return compared(name, value)
    }
}

/// Casts a number to another type; nil if there is no such cast.
private func cast(_ from: String, _ to: String) -> ((HeadValue) -> HeadValue)? {
    switch (from, to) {
    case ("float", "double"): return { .double(Double($0.asFloat)) }
    case ("double", "float"): return { .float(Float($0.asDouble)) }
    case ("float", "int32"): return { .int32(truncated(Double($0.asFloat), -0x1p31 - 1)) }
    case ("double", "int32"): return { .int32(truncated($0.asDouble, -0x1p31 - 1)) }
    case ("float", "int64"): return { .int64(truncated(Double($0.asFloat), (-0x1p63).nextDown)) }
    case ("double", "int64"): return { .int64(truncated($0.asDouble, (-0x1p63).nextDown)) }
    case ("int32", "float"): return { .float(Float($0.asInt32)) }
    case ("int32", "double"): return { .double(Double($0.asInt32)) }
    case ("int32", "int64"): return { .int64(Int64($0.asInt32)) }
    case ("int32", "string"): return { .string(String($0.asInt32)) }
    case ("int64", "float"): return { .float(Float($0.asInt64)) }
    case ("int64", "double"): return { .double(Double($0.asInt64)) }
    case ("int64", "int32"): return { .int32(Int32(truncatingIfNeeded: $0.asInt64)) }
    case ("int64", "string"): return { .string(String($0.asInt64)) }
    case ("bool", "float"): return { .float($0.asBool ? 1 : 0) }
    case ("bool", "double"): return { .double($0.asBool ? 1 : 0) }
    case ("bool", "int32"): return { .int32($0.asBool ? 1 : 0) }
    case ("bool", "int64"): return { .int64($0.asBool ? 1 : 0) }
    default: return nil
    }
}

/// The whole part of a number above `low`; the least number of the type where it does not fit.
private func truncated<T: FixedWidthInteger & SignedInteger>(_ value: Double, _ low: Double) -> T {
    value > low && value < -Double(T.min) ? T(value) : T.min
}

/// Parses constants.
private func values(_ texts: [String], _ element: String) throws -> [HeadValue] {
    try texts.map { text in
        let value: HeadValue?
        switch element {
        case "float": value = hasDigits(text, 8) ? UInt32(text, radix: 16).map { .float(Float(bitPattern: $0)) } : nil
        case "double": value = hasDigits(text, 16) ? UInt64(text, radix: 16).map { .double(Double(bitPattern: $0)) } : nil
        case "int32": value = Int32(text).flatMap { String($0) == text ? .int32($0) : nil }
        case "int64": value = Int64(text).flatMap { String($0) == text ? .int64($0) : nil }
        case "bool": value = text == "1" ? .bool(true) : text == "0" ? .bool(false) : nil
        case "string": value = .string(text)
        default: value = nil
        }
        guard let value else { throw HeadError(description: "\(text) is no \(element)") }
        return value
    }
}

private func hasDigits(_ text: String, _ count: Int) -> Bool {
    text.utf8.count == count && text.utf8.allSatisfy { (48...57).contains($0) || (97...102).contains($0) }
}

/// Checks that a text consists of parts with any text between them, each placed as far left as possible.
private func matcher(_ parts: [[String]]) throws -> ([UInt8]) -> Bool {
    try check(!parts.isEmpty && parts.allSatisfy { !$0.isEmpty }, "a pattern has no parts")
    // Any character is nil.
    let letters: [[Unicode.Scalar?]] = parts.map { pieces in
        var part: [Unicode.Scalar?] = []
        for piece in pieces {
            part.append(nil)
            part += piece.unicodeScalars.map(Optional.some)
        }
        return Array(part.dropFirst())
    }
    let begin = letters[0], end = letters.count > 1 ? letters[letters.count - 1] : []
    return { bytes in
        let text = Array(String(decoding: bytes, as: UTF8.self).unicodeScalars)
        func isAt(_ place: Int, _ part: [Unicode.Scalar?]) -> Bool {
            part.indices.allSatisfy { part[$0] == nil || part[$0] == text[place + $0] }
        }
        var place = begin.count
        let last = text.count - end.count
        if place > last || !isAt(0, begin) || !isAt(last, end) { return false }
        for part in letters.dropFirst().dropLast() {
            while place + part.count <= last && !isAt(place, part) { place += 1 }
            place += part.count
        }
        return letters.count > 1 ? place <= last : place == last
    }
}

/// The function that fills the slot of a raw value, and the type of the slot.
private func input(_ name: String, _ dtype: String, _ role: String) throws -> (([String: HeadValue?]) throws -> HeadValue, String) {
    guard let element = feast[dtype] else { throw HeadError(description: "input \(name) has type \(dtype)") }
    func typed(_ value: HeadValue) throws -> HeadValue {
        switch (element, value) {
        case ("float", .float), ("double", .double), ("int32", .int32), ("int64", .int64), ("bool", .bool), ("string", .text):
            return value
        case ("float", .double(let number)): return .float(Float(number))
        case ("int64", .int32(let number)): return .int64(Int64(number))
        default: throw HeadError(description: "input \(name) is \(value); expected a \(dtype)")
        }
    }
    let empty = try element == "string" ? HeadValue.text([]) : values([zeros[element] ?? "0"], element)[0]
    let number: ((HeadValue) -> HeadValue)? = element == "float" ? { $0 } : cast(element, "float")
    switch role {
    case "valid": return ({ row in .bool((row[name] ?? nil) != nil) }, "bool")
    case "number":
        guard let number else { break }
        return ({ row in try (row[name] ?? nil).map { number(try typed($0)) } ?? .float(.nan) }, "float")
    case "value", "text":
        if role == "text" && element != "string" { break }
        return ({ row in try (row[name] ?? nil).map(typed) ?? empty }, element)
    default: break
    }
    throw HeadError(description: "input \(name) is a \(role) of \(dtype)")
}

private let zeros = ["float": "00000000", "double": "0000000000000000"]
