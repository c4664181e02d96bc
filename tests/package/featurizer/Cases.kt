// Holds Head.kt to a file of cases, whose lines tests/features/head/cases.py describes.

package isthmus

import java.io.File
import java.util.Base64
import kotlin.system.exitProcess

fun main(arguments: Array<String>) {
    var head: Head? = null
    var columns = listOf<Pair<String, String>>()
    var (passed, failed) = Pair(0, 0)
    fun check(found: String, expected: String) {
        if (found == expected) passed++ else if (failed++ < 10) println("$found\nand expected was\n$expected")
    }
    File(arguments[0]).forEachLine { line ->
        val words = line.split(" ")
        val rest = words.drop(1)
        when (words[0]) {
            "head" -> head = Head(Base64.getDecoder().decode(rest[0]))
            "columns" -> columns = rest.map { it.substringBefore(":") to it.substringAfter(":") }
            "torn" -> check(
                try {
                    "taken: ${line.take(200)}".also { Head(Base64.getDecoder().decode(rest[0])) }
                } catch (_: HeadError) {
                    "refused"
                },
                "refused",
            )
            "row" -> {
                val row = columns.zip(rest).associate { (column, text) -> column.first to read(text, column.second) }
                val answer = head!!.row(row)
                val found = answer.tensors.values.flatMap(::shown) + if (answer.refused) "1" else "0"
                check(found.joinToString(" "), line.substringAfter(" = "))
            }
        }
    }
    println("$passed passed, $failed failed")
    exitProcess(if (failed == 0) 0 else 1)
}

private fun read(text: String, dtype: String): Any? = when {
    text == "-" -> null
    dtype == "Bool" -> text == "1"
    dtype == "Int32" -> text.toInt()
    dtype == "Float32" -> if (text == "nan") Float.NaN else Float.fromBits(text.toUInt(16).toInt())
    dtype == "Float64" -> if (text == "nan") Double.NaN else Double.fromBits(text.toULong(16).toLong())
    dtype == "String" -> text.drop(1).chunked(2).map { it.toInt(16).toByte() }.toByteArray().decodeToString()
    else -> text.toLong()
}

private fun shown(tensor: Any): List<String> = when (tensor) {
    is FloatArray -> tensor.map { if (it.isNaN()) "nan" else "%08x".format(it.toBits()) }
    is DoubleArray -> tensor.map { if (it.isNaN()) "nan" else "%016x".format(it.toBits()) }
    is IntArray -> tensor.map { it.toString() }
    is LongArray -> tensor.map { it.toString() }
    is BooleanArray -> tensor.map { if (it) "1" else "0" }
    else -> (tensor as List<*>).map { text -> "s" + (text as String).encodeToByteArray().joinToString("") { "%02x".format(it) } }
}
