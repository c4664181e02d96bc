// Computes the inputs of a numeric core: the steps of `head.json`, bit for bit. docs/heads.md describes the format.

package isthmus

import kotlin.math.abs
import kotlin.math.ceil
import kotlin.math.floor
import kotlin.math.round
import kotlin.math.sqrt

/** The reason a head cannot be read, or a row cannot be computed. */
class HeadError(message: String, cause: Throwable? = null) : Exception(message, cause)

/**
 * Inputs of a core for a row: a FloatArray, DoubleArray, IntArray, LongArray, BooleanArray or list of strings by name.
 *
 * If the row is refused, a request feature is undefined for its values, and the answer is NaN.
 */
class HeadRow(val tensors: Map<String, Any>, val refused: Boolean)

/** The head in `head.json`. Threads may share it. A HeadError if the bytes are none, or of another version. */
class Head(bytes: ByteArray) {
    private val inputs: List<(Map<String, Any?>) -> Any>
    private val constants = mutableListOf<Any>()
    private val steps = mutableListOf<HeadStep>()
    private val outputs: List<HeadOutput>
    private val refused: Int?

    init {
        check(bytes.size <= LARGEST) { "head.json has ${bytes.size} bytes; expected at most $LARGEST" }
        try {
            val form = HeadJson(bytes.decodeToString(throwOnInvalidSequence = true)).read() as Map<*, *>
            check(form["version"] == VERSION) { "head.json has version ${form["version"]}; expected $VERSION" }
            val types = mutableListOf<String>()
            fun place(slot: Any?, element: String): Int {
                check(slot is Long && slot in types.indices) { "slot $slot of ${types.size} is read" }
                val number = (slot as Long).toInt()
                check(types[number] == element) { "slot $slot holds ${types[number]}; expected $element" }
                return number
            }
            inputs = form.list("inputs").map { input ->
                val (name, dtype, role) = (input as List<*>).map { it as String }
                val (fill, element) = input(name, dtype, role)
                fill.also { types += element }
            }
            for (part in form.list("constants")) {
                val (element, texts) = part as List<*>
                for (value in valuesOf(texts, element as String)) {
                    constants += value
                    types += element
                }
            }
            for (group in form.list("steps")) {
                val (name, element, slots) = group as List<*>
                val of = operation(name as String, element as String, group.getOrNull(3))
                val size = of.operands.size
                check((slots as List<*>).size % size == 0) { "$name takes $size operands, and gets ${slots.size}" }
                check(types.size + slots.size / size <= MOST) { "more than $MOST slots" }
                for (operands in slots.chunked(size)) {
                    val places = operands.mapIndexed { n, slot -> place(slot, of.operands[n]) }
                    steps += HeadStep(of.apply, places[0], places.getOrElse(1) { places[0] }, places.getOrElse(2) { places[0] })
                    types += of.output
                }
            }
            outputs = form.list("outputs").map { output ->
                val (name, element, slots) = output as List<*>
                HeadOutput(name as String, element as String, (slots as List<*>).map { place(it, element) })
            }
            check(outputs.distinctBy { it.name }.size == outputs.size) { "two outputs have the same name" }
            check("refused" in form) { "there is no mask" }
            refused = form["refused"]?.let { place(it, "bool") }
        } catch (error: HeadError) {
            throw error
        } catch (error: Exception) { // of another form
            throw HeadError("head.json cannot be read: ${error.message}", error)
        }
    }

    /**
     * Computes the inputs of the core from a row of raw values, by the names of the model's inputs; null for no value.
     *
     * Whole numbers are Ints or Longs, a UnixTimestamp is in microseconds since 1970 UTC.
     */
    fun row(values: Map<String, Any?>): HeadRow {
        val slots = inputs.mapTo(ArrayList(inputs.size + constants.size + steps.size)) { it(values) }
        slots.addAll(constants)
        try {
            for (step in steps) slots.add(step.apply(slots[step.a], slots[step.b], slots[step.c]))
        } catch (error: ArithmeticException) {
            throw HeadError("a step divides by zero", error)
        } catch (error: IndexOutOfBoundsException) {
            throw HeadError("a step reads beyond a table", error)
        }
        return HeadRow(outputs.associate { it.name to it.tensor(slots) }, refused != null && slots[refused] as Boolean)
    }
}

private const val VERSION = 1L
private const val LARGEST = 1 shl 24
private const val MOST = 1 shl 20
private const val TWO_63 = 9.223372036854775808E18
private const val DIGITS = "0123456789"
private val FEAST = mapOf(
    "Bool" to "bool", "Int32" to "int32", "Int64" to "int64", "UnixTimestamp" to "int64", "Float32" to "float",
    "Float64" to "double", "String" to "string",
)
private val PREDICATES = setOf("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "IsNaN", "IsInf", "RegexFullMatch")
private val UNARY = setOf("Abs", "Neg", "Floor", "Ceil", "Round", "Sqrt", "Sign", "IsNaN", "IsInf", "BitwiseNot", "Not")

private typealias Apply = (Any, Any, Any) -> Any

private class HeadStep(val apply: Apply, val a: Int, val b: Int, val c: Int)

/** The function of an operator, and the types of its operands and of its result. */
private class HeadOperation(val apply: Apply, val operands: List<String>, val output: String)

private class HeadOutput(val name: String, private val element: String, private val slots: List<Int>) {
    fun tensor(values: List<Any>): Any = when (element) {
        "float" -> FloatArray(slots.size) { values[slots[it]] as Float }
        "double" -> DoubleArray(slots.size) { values[slots[it]] as Double }
        "int32" -> IntArray(slots.size) { values[slots[it]] as Int }
        "int64" -> LongArray(slots.size) { values[slots[it]] as Long }
        "bool" -> BooleanArray(slots.size) { values[slots[it]] as Boolean }
        else -> slots.map { values[it] as String }
    }
}

private inline fun check(holds: Boolean, message: () -> String) {
    if (!holds) throw HeadError(message())
}

private fun Map<*, *>.list(name: String): List<*> = this[name] as List<*>

private fun floats(function: (Float, Float) -> Any): Apply = { a, b, _ -> function(a as Float, b as Float) }
private fun doubles(function: (Double, Double) -> Any): Apply = { a, b, _ -> function(a as Double, b as Double) }
private fun ints(function: (Int, Int) -> Any): Apply = { a, b, _ -> function(a as Int, b as Int) }
private fun longs(function: (Long, Long) -> Any): Apply = { a, b, _ -> function(a as Long, b as Long) }
private fun booleans(function: (Boolean, Boolean) -> Any): Apply = { a, b, _ -> function(a as Boolean, b as Boolean) }
private fun texts(function: (String, String) -> Any): Apply = { a, b, _ -> function(a as String, b as String) }

/** By element type. */
private val OPERATORS: Map<String, Map<String, Apply>> = mapOf(
    "float" to mapOf(
        "Add" to floats { a, b -> a + b }, "Sub" to floats { a, b -> a - b }, "Mul" to floats { a, b -> a * b },
        "Div" to floats { a, b -> a / b }, "Mod" to floats { a, b -> a % b },
        "Max" to floats { a, b -> if (a > b || a.isNaN()) a else b }, "Min" to floats { a, b -> if (a < b || a.isNaN()) a else b },
        "Abs" to floats { a, _ -> abs(a) }, "Neg" to floats { a, _ -> -a }, "Floor" to floats { a, _ -> floor(a) },
        "Ceil" to floats { a, _ -> ceil(a) }, "Round" to floats { a, _ -> round(a) }, "Sqrt" to floats { a, _ -> sqrt(a) },
        "Sign" to floats { a, _ -> if (a > 0) 1f else if (a < 0) -1f else if (a.isNaN()) a else 0f },
        "IsNaN" to floats { a, _ -> a.isNaN() }, "IsInf" to floats { a, _ -> a.isInfinite() },
        "Equal" to floats { a, b -> a == b }, "Less" to floats { a, b -> a < b }, "LessOrEqual" to floats { a, b -> a <= b },
        "Greater" to floats { a, b -> a > b }, "GreaterOrEqual" to floats { a, b -> a >= b },
    ),
    "double" to mapOf(
        "Add" to doubles { a, b -> a + b }, "Sub" to doubles { a, b -> a - b }, "Mul" to doubles { a, b -> a * b },
        "Div" to doubles { a, b -> a / b }, "Mod" to doubles { a, b -> a % b },
        "Max" to doubles { a, b -> if (a > b || a.isNaN()) a else b }, "Min" to doubles { a, b -> if (a < b || a.isNaN()) a else b },
        "Abs" to doubles { a, _ -> abs(a) }, "Neg" to doubles { a, _ -> -a }, "Floor" to doubles { a, _ -> floor(a) },
        "Ceil" to doubles { a, _ -> ceil(a) }, "Round" to doubles { a, _ -> round(a) }, "Sqrt" to doubles { a, _ -> sqrt(a) },
        "Sign" to doubles { a, _ -> if (a > 0) 1.0 else if (a < 0) -1.0 else if (a.isNaN()) a else 0.0 },
        "IsNaN" to doubles { a, _ -> a.isNaN() }, "IsInf" to doubles { a, _ -> a.isInfinite() },
        "Equal" to doubles { a, b -> a == b }, "Less" to doubles { a, b -> a < b }, "LessOrEqual" to doubles { a, b -> a <= b },
        "Greater" to doubles { a, b -> a > b }, "GreaterOrEqual" to doubles { a, b -> a >= b },
    ),
    "int32" to mapOf(
        "Add" to ints { a, b -> a + b }, "Sub" to ints { a, b -> a - b }, "Mul" to ints { a, b -> a * b },
        "Div" to ints { a, b -> a / b }, "Mod" to ints { a, b -> a.mod(b) }, "Max" to ints { a, b -> maxOf(a, b) },
        "Min" to ints { a, b -> minOf(a, b) }, "Abs" to ints { a, _ -> abs(a) }, "Neg" to ints { a, _ -> -a },
        "BitwiseAnd" to ints { a, b -> a and b }, "BitwiseOr" to ints { a, b -> a or b },
        "BitwiseXor" to ints { a, b -> a xor b }, "BitwiseNot" to ints { a, _ -> a.inv() },
        "Equal" to ints { a, b -> a == b }, "Less" to ints { a, b -> a < b }, "LessOrEqual" to ints { a, b -> a <= b },
        "Greater" to ints { a, b -> a > b }, "GreaterOrEqual" to ints { a, b -> a >= b },
    ),
    "int64" to mapOf(
        "Add" to longs { a, b -> a + b }, "Sub" to longs { a, b -> a - b }, "Mul" to longs { a, b -> a * b },
        "Div" to longs { a, b -> a / b }, "Mod" to longs { a, b -> a.mod(b) }, "Max" to longs { a, b -> maxOf(a, b) },
        "Min" to longs { a, b -> minOf(a, b) }, "Abs" to longs { a, _ -> abs(a) }, "Neg" to longs { a, _ -> -a },
        "BitwiseAnd" to longs { a, b -> a and b }, "BitwiseOr" to longs { a, b -> a or b },
        "BitwiseXor" to longs { a, b -> a xor b }, "BitwiseNot" to longs { a, _ -> a.inv() },
        "Equal" to longs { a, b -> a == b }, "Less" to longs { a, b -> a < b }, "LessOrEqual" to longs { a, b -> a <= b },
        "Greater" to longs { a, b -> a > b }, "GreaterOrEqual" to longs { a, b -> a >= b },
    ),
    "bool" to mapOf(
        "Equal" to booleans { a, b -> a == b }, "And" to booleans { a, b -> a && b }, "Or" to booleans { a, b -> a || b },
        "Not" to booleans { a, _ -> !a },
    ),
    "string" to mapOf("Equal" to texts { a, b -> a == b }, "StringConcat" to texts { a, b -> a + b }),
)

/** Casts a number to another type; null if there is no such cast. */
private fun cast(from: String, to: String): ((Any) -> Any)? = when (from to to) {
    "float" to "double" -> { a -> (a as Float).toDouble() }
    "double" to "float" -> { a -> (a as Double).toFloat() }
    "float" to "int32", "double" to "int32" -> { a -> truncated((a as Number).toDouble()) }
    "float" to "int64", "double" to "int64" -> { a -> truncatedLong((a as Number).toDouble()) }
    "int32" to "float", "int64" to "float" -> { a -> (a as Number).toFloat() }
    "int32" to "double", "int64" to "double" -> { a -> (a as Number).toDouble() }
    "int32" to "int64" -> { a -> (a as Int).toLong() }
    "int64" to "int32" -> { a -> (a as Long).toInt() }
    "int32" to "string", "int64" to "string" -> { a -> a.toString() }
    "bool" to "float" -> { a -> if (a as Boolean) 1f else 0f }
    "bool" to "double" -> { a -> if (a as Boolean) 1.0 else 0.0 }
    "bool" to "int32" -> { a -> if (a as Boolean) 1 else 0 }
    "bool" to "int64" -> { a -> if (a as Boolean) 1L else 0L }
    else -> null
}

private fun truncated(a: Double): Int = if (a > -2147483649.0 && a < 2147483648.0) a.toInt() else Int.MIN_VALUE

private fun truncatedLong(a: Double): Long = if (a >= -TWO_63 && a < TWO_63) a.toLong() else Long.MIN_VALUE

/** Parses a constant. */
private fun valueOf(text: String, element: String): Any = when (element) {
    "float" -> Float.fromBits(bits(text, 8).toInt())
    "double" -> Double.fromBits(bits(text, 16).toLong())
    "int32" -> text.toInt().also { check("$it" == text) { "$text is no int32" } }
    "int64" -> text.toLong().also { check("$it" == text) { "$text is no int64" } }
    "bool" -> (text == "1").also { check(it || text == "0") { "$text is no bool" } }
    "string" -> text
    else -> throw HeadError("no values of $element")
}

private fun bits(text: String, digits: Int): ULong {
    check(text.length == digits && text.all { it in "0123456789abcdef" }) { "$text has no $digits digits" }
    return text.toULong(16)
}

private fun valuesOf(texts: Any?, element: String): List<Any> = (texts as List<*>).map { valueOf(it as String, element) }

private fun operation(name: String, element: String, attribute: Any?): HeadOperation {
    val output = if (name in PREDICATES) "bool" else element
    fun unary(operand: String, output: String, function: (Any) -> Any) = HeadOperation({ a, _, _ -> function(a) }, listOf(operand), output)
    val known = OPERATORS[element] ?: throw HeadError("no operators of $element")
    known[name]?.let { apply ->
        check(attribute == null) { "$name has no attribute" }
        return HeadOperation(apply, List(if (name in UNARY) 1 else 2) { element }, output)
    }
    return when (name) {
        "Where" -> {
            check(element != "bool") { "no choice of $element" }
            HeadOperation({ condition, yes, no -> if (condition as Boolean) yes else no }, listOf("bool", element, element), element)
        }
        "Cast" -> unary(element, attribute as String, cast(element, attribute) ?: throw HeadError("no cast of $element to $attribute"))
        "Gather" -> {
            val table = valuesOf(attribute, element)
            unary("int64", element) { place -> table[Math.toIntExact((place as Long) + if (place < 0) table.size else 0)] }
        }
        "LabelEncoder" -> {
            check(element == "string" || element == "int64") { "no vocabulary of $element" }
            val (keys, values, other) = attribute as List<*>
            val (known, places) = Pair(valuesOf(keys, element), valuesOf(values, "int64"))
            check(known.size == places.size) { "a vocabulary has a value for each key" }
            val (vocabulary, unknown) = Pair(known.zip(places).toMap(), valueOf(other as String, "int64"))
            unary(element, "int64") { key -> vocabulary[key] ?: unknown }
        }
        "StringNormalizer" -> {
            check(element == "string" && (attribute == "LOWER" || attribute == "UPPER")) { "no change of case $attribute" }
            val (letters, shift) = if (attribute == "LOWER") Pair('A'..'Z', 32) else Pair('a'..'z', -32)
            unary(element, element) { text -> String(CharArray((text as String).length) { if (text[it] in letters) text[it] + shift else text[it] }) }
        }
        "RegexFullMatch" -> {
            check(element == "string") { "no pattern of $element" }
            if (attribute == "ascii") unary(element, output) { text -> (text as String).all { it < '\u0080' } }
            else matcher((attribute as List<*>).map { valuesOf(it, "string") }).let { matches -> unary(element, output) { matches(it as String) } }
        }
        else -> throw HeadError("no operator $name of $element")
    }
}

/** Checks that a text consists of parts with any text between them, each placed as far left as possible. */
private fun matcher(parts: List<List<Any>>): (String) -> Boolean {
    check(parts.isNotEmpty() && parts.all { it.isNotEmpty() }) { "a pattern has no parts" }
    // Any character is -1.
    val letters = parts.map { pieces -> pieces.flatMap { listOf(-1) + (it as String).codePoints().toArray().toList() }.drop(1) }
    val (begin, end) = Pair(letters.first(), if (letters.size > 1) letters.last() else emptyList())
    return matches@{ value ->
        val text = value.codePoints().toArray()
        fun isAt(place: Int, part: List<Int>) = part.indices.all { part[it] == -1 || part[it] == text[place + it] }
        var place = begin.size
        val last = text.size - end.size
        if (place > last || !isAt(0, begin) || !isAt(last, end)) return@matches false
        for (part in letters.drop(1).dropLast(1)) {
            while (place + part.size <= last && !isAt(place, part)) place++
            place += part.size
        }
        if (letters.size > 1) place <= last else place == last
    }
}

private fun whole(value: Any): Long? = if (value is Long || value is Int || value is Short || value is Byte) (value as Number).toLong() else null

/** The function that fills the slot of a raw value, and the type of the slot. */
private fun input(name: String, dtype: String, role: String): Pair<(Map<String, Any?>) -> Any, String> {
    val element = FEAST[dtype] ?: throw HeadError("input $name has type $dtype")
    fun typed(value: Any): Any = when (element) {
        "float" -> (value as? Number)?.toFloat()
        "double" -> (value as? Number)?.toDouble()
        "int32" -> whole(value)?.takeIf { it == it.toInt().toLong() }?.toInt()
        "int64" -> whole(value)
        "bool" -> value as? Boolean ?: (value as? Number)?.let { it.toDouble() != 0.0 }
        else -> value as? String
    } ?: throw HeadError("input $name is $value; expected a $dtype")
    val number = if (element == "float") { a -> a } else cast(element, "float")
    val empty: Any = when (element) {
        "float" -> 0f
        "double" -> 0.0
        "int32" -> 0
        "int64" -> 0L
        "bool" -> false
        else -> ""
    }
    return when {
        role == "valid" -> Pair({ row -> row[name] != null }, "bool")
        role == "number" && number != null -> Pair({ row -> row[name]?.let { number(typed(it)) } ?: Float.NaN }, "float")
        role == "value" || (role == "text" && element == "string") -> Pair({ row -> row[name]?.let { typed(it) } ?: empty }, element)
        else -> throw HeadError("input $name is a $role of $dtype")
    }
}

/** JSON as maps, lists, text, Longs and null, which is all that a head has. */
private class HeadJson(private val text: String) {
    private var next = 0

    fun read(): Any? = value(0).also { check(sign() == null) { "there is more after it" } }

    /** The next character that is no space; null at the end. */
    private fun sign(): Char? {
        while (next < text.length && text[next] in " \t\r\n") next++
        return text.getOrNull(next)
    }

    private fun value(depth: Int): Any? {
        check(depth < 10) { "it is nested too deeply" }
        return when (val begin = sign()) {
            '{' -> items('}') { string().also { expect(':') } to value(depth + 1) }.toMap()
            '[' -> items(']') { value(depth + 1) }
            '"' -> string()
            'n' -> null.also { word("null") }
            else -> {
                check(begin == '-' || (begin != null && begin in DIGITS)) { "no value at $next" }
                val start = next++
                while (next < text.length && text[next] in DIGITS) next++
                text.substring(start, next).toLong()
            }
        }
    }

    private fun word(word: String) {
        check(text.startsWith(word, next)) { "no value at $next" }
        next += word.length
    }

    private fun expect(expected: Char) {
        check(sign() == expected) { "no $expected at $next" }
        next++
    }

    private fun <T> items(end: Char, item: () -> T): List<T> {
        val items = mutableListOf<T>()
        next++
        while (sign() != end) {
            if (items.isNotEmpty()) expect(',')
            items += item()
        }
        next++
        return items
    }

    private fun string(): String {
        expect('"')
        val letters = StringBuilder()
        while (text[next] != '"') {
            val letter = text[next++]
            letters.append(if (letter == '\\') escaped(text[next++]) else letter)
        }
        next++
        return letters.toString()
    }

    private fun escaped(letter: Char): Char = when (letter) {
        'n' -> '\n'
        't' -> '\t'
        'r' -> '\r'
        'b' -> '\b'
        'f' -> '\u000c'
        'u' -> text.substring(next, next + 4).toInt(16).toChar().also { next += 4 }
        else -> letter
    }
}

