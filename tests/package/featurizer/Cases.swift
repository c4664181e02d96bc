// Holds Head.swift to a file of cases, whose lines tests/features/head/cases.py describes.

import Foundation

@main
struct Cases {
    static func main() throws {
        let content = try String(contentsOf: URL(fileURLWithPath: CommandLine.arguments[1]), encoding: .ascii)
        var head: Head?
        var columns: [(String, String)] = []
        var passed = 0, failed = 0
        func check(_ found: String, _ expected: String) {
            if found == expected { return passed += 1 }
            failed += 1
            if failed <= 10 { print("\(found)\nand expected was\n\(expected)") }
        }
        for line in content.split(separator: "\n") {
            let words = line.split(separator: " ", omittingEmptySubsequences: false).map(String.init)
            switch words[0] {
            case "head": head = try Head(Data(base64Encoded: words[1])!)
            case "columns":
                columns = words.dropFirst().map { word in
                    let parts = word.split(separator: ":").map(String.init)
                    return (parts[0], parts[1])
                }
            case "torn":
                do {
                    _ = try Head(Data(base64Encoded: words[1])!)
                    check("taken: \(line.prefix(200))", "refused")
                } catch { check(error is HeadError ? "refused" : "\(error)", "refused") }
            case "row":
                var row: [String: HeadValue?] = [:]
                for (column, text) in zip(columns, words.dropFirst()) { row[column.0] = .some(read(text, column.1)) }
                let answer = try head!.row(row)
                let expected = words.drop { $0 != "=" }.dropFirst().joined(separator: " ")
                let order = head!.names.flatMap { answer.tensors[$0]!.map(shown) }
                check((order + [answer.refused ? "1" : "0"]).joined(separator: " "), expected)
            default: break
            }
        }
        print("\(passed) passed, \(failed) failed")
        exit(failed == 0 ? 0 : 1)
    }
}

func read(_ text: String, _ dtype: String) -> HeadValue? {
    if text == "-" { return nil }
    switch dtype {
    case "Bool": return .bool(text == "1")
    case "Int32": return .int32(Int32(text)!)
    case "Float32": return .float(text == "nan" ? .nan : Float(bitPattern: UInt32(text, radix: 16)!))
    case "Float64": return .double(text == "nan" ? .nan : Double(bitPattern: UInt64(text, radix: 16)!))
    case "String":
        let digits = Array(text.dropFirst())
        return .text(stride(from: 0, to: digits.count, by: 2).map { UInt8(String(digits[$0...($0 + 1)]), radix: 16)! })
    default: return .int64(Int64(text)!)
    }
}

func shown(_ value: HeadValue) -> String {
    func digits(_ bits: UInt64, _ count: Int) -> String {
        let text = String(bits, radix: 16)
        return String(repeating: "0", count: count - text.count) + text
    }
    switch value {
    case .float(let number): return number.isNaN ? "nan" : digits(UInt64(number.bitPattern), 8)
    case .double(let number): return number.isNaN ? "nan" : digits(number.bitPattern, 16)
    case .int32(let number): return String(number)
    case .int64(let number): return String(number)
    case .bool(let truth): return truth ? "1" : "0"
    case .text(let bytes): return "s" + bytes.map { digits(UInt64($0), 2) }.joined()
    }
}
