// Predictions from keys and request fields. It needs com.microsoft.onnxruntime:onnxruntime-android, and outside of Android
// com.microsoft.onnxruntime:onnxruntime and org.json:json.

package isthmus

import ai.onnxruntime.OnnxJavaType
import ai.onnxruntime.OnnxTensor
import ai.onnxruntime.OrtEnvironment
import org.json.JSONArray
import org.json.JSONObject
import java.io.File
import java.io.IOException
import java.net.HttpURLConnection
import java.net.URL
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.DoubleBuffer
import java.nio.FloatBuffer
import java.nio.IntBuffer
import java.nio.LongBuffer
import java.util.Base64
import kotlin.math.abs

private class ModelInput(item: JSONObject) {
    val name: String = item.getString("name")
    val dtype: String = item.getString("dtype")
    val tensor: String = item.getString("tensor")
    val size: Int = item.optInt("size")
}

/**
 * The smallest model of a package in ORT format.
 *
 * @param read returns the bytes of a file of the package by its name: `{ assets.open(it).readBytes() }`.
 * @param api the address of `isthmus serve`, for `lookup`.
 * @param key an API key with the scope `read:*`, if the server asks for one.
 */
class Predictor(read: (String) -> ByteArray, private val api: String? = null, private val key: String? = null) : AutoCloseable {
    val manifest = JSONObject(read("manifest.json").decodeToString())
    val file: String = manifest.getJSONArray("variants").objects().filter { it.getString("format") == "ort" }
        .minByOrNull { it.getLong("bytes") }!!.getString("file")
    private val inputs = manifest.getJSONArray("inputs").objects().map(::ModelInput)
    private val tensors = manifest.getJSONArray("tensors").objects().map { it.getString("name") to it.getString("element") }
    private val output: String = manifest.getJSONArray("outputs").getJSONObject(0).getString("name")
    private val env = OrtEnvironment.getEnvironment()
    private val session = env.createSession(read(file))

    /**
     * Predicts one row: the probability of each class by its name, or the number by the name of the output. Null where a
     * request feature is not defined for these values.
     *
     * @param keys join keys by name.
     * @param request the other inputs by name, null where there is no value.
     * @param stored the stored features: by default `lookup` fetches them; or `features` of a snapshot.
     */
    fun predict(keys: Map<String, Any?>, request: Map<String, Any?>, stored: Map<String, Any?>? = null): Map<String, Float>? {
        val fed = feeds(keys + request + (stored ?: lookup(keys)))
        try {
            val numbers = session.run(fed, setOf(output)).use { answers ->
                val buffer = (answers[0] as OnnxTensor).floatBuffer
                FloatArray(buffer.remaining()) { buffer.get(it) }
            }
            if (numbers.any { it.isNaN() }) return null
            val names = manifest.optJSONArray("classes")?.let { classes -> List(classes.length()) { classes.getString(it) } }
            return (names ?: listOf(output)).zip(numbers.toList()).toMap()
        } finally {
            fed.values.forEach { it.close() }
        }
    }

    /** Fetches the stored features of these keys, null where a key has no row or its row has expired. Not on the main thread. */
    fun lookup(keys: Map<String, Any?>): Map<String, Any?> {
        val types = inputs.filter { "__" in it.name }.associate { it.name to it.dtype }
        if (types.isEmpty()) return emptyMap()
        val asked = JSONObject()
            .put("features", JSONArray(types.keys.map { it.replaceFirst("__", ":") }))
            .put("entities", JSONObject(keys.mapValues { (_, value) -> JSONArray(listOf(value)) }))
            .put("full_feature_names", true)
        val connection = URL("$api/get-online-features").openConnection() as HttpURLConnection
        connection.doOutput = true
        if (key != null) connection.setRequestProperty("Authorization", "Bearer $key")
        connection.outputStream.use { it.write(asked.toString().toByteArray()) }
        if (connection.responseCode != 200) throw IOException("lookup: ${connection.responseCode}")
        val answer = JSONObject(connection.inputStream.use { it.readBytes().decodeToString() })
        val names = answer.getJSONObject("metadata").getJSONArray("feature_names")
        val values = answer.getJSONArray("results").objects().map { it.getJSONArray("values").orNull(0) }
        return values.mapIndexed { n, value -> names.getString(n) to value }.filter { (name, _) -> name in types }
            // The API has seconds, the model microseconds.
            .associate { (name, value) ->
                name to if (types[name] == "UnixTimestamp" && value is Number) Math.round(value.toDouble() * 1e6) else value
            }
    }

    /** The tensors of one row. */
    fun feeds(row: Map<String, Any?>): Map<String, OnnxTensor> {
        val missing = inputs.map { it.name }.distinct().filter { it !in row }
        require(missing.isEmpty()) { "no value for ${missing.joinToString()}; pass null where there is none" }
        return tensors.associate { (name, element) ->
            val values = if (name == "given_valid") inputs.filter { it.tensor.startsWith("given_") }.map { if (row[it.name] == null) 0L else 1L }
            else inputs.filter { it.tensor == name }.flatMap { castAll(row[it.name], it) }
            val isGiven = name.startsWith("given_")
            val shape = if (isGiven) longArrayOf(values.size.toLong(), 1) else longArrayOf(1, values.size.toLong())
            name to tensor(values, element, shape)
        }
    }

    private fun tensor(values: List<Any?>, element: String, shape: LongArray): OnnxTensor {
        fun whole(value: Any?) = value as Long? ?: 0L
        return when (element) {
            "string" -> OnnxTensor.createTensor(env, Array(values.size) { values[it] as String? ?: "" }, shape)
            "float" -> OnnxTensor.createTensor(env, FloatBuffer.wrap(FloatArray(values.size) { (values[it] as Number?)?.toFloat() ?: Float.NaN }), shape)
            "double" -> OnnxTensor.createTensor(env, DoubleBuffer.wrap(DoubleArray(values.size) { (values[it] as Number?)?.toDouble() ?: Double.NaN }), shape)
            "int64" -> OnnxTensor.createTensor(env, LongBuffer.wrap(LongArray(values.size) { whole(values[it]) }), shape)
            "int32" -> OnnxTensor.createTensor(env, IntBuffer.wrap(IntArray(values.size) { whole(values[it]).toInt() }), shape)
            else -> {
                val bytes = ByteBuffer.allocateDirect(values.size)
                values.forEach { bytes.put(whole(it).toByte()) }
                bytes.rewind()
                OnnxTensor.createTensor(env, bytes, shape, if (element == "bool") OnnxJavaType.BOOL else OnnxJavaType.UINT8)
            }
        }
    }

    override fun close() = session.close()
}

private val WORDS = listOf("NaN", "Infinity", "-Infinity")

/** A value as a String, a Double, a Float or a Long. A UnixTimestamp is whole microseconds since 1970 UTC. */
private fun cast(value: Any?, input: ModelInput): Any? {
    val (name, dtype) = Pair(input.name, input.dtype)
    val typed: Any? = when {
        value == null -> return null
        dtype == "String" -> value as? String
        dtype == "Float32" || input.size > 0 -> if (value in WORDS) "$value".toFloat() else (value as? Number)?.toFloat()
        dtype == "Float64" -> if (value in WORDS) "$value".toDouble() else (value as? Number)?.toDouble()
        value is Boolean -> if (value) 1L else 0L
        else -> "$value".toLongOrNull()?.takeIf { dtype != "Int32" || it == it.toInt().toLong() }
    }
    return requireNotNull(typed) { "$name is $value; expected a $dtype" }
}

private fun castAll(value: Any?, input: ModelInput): List<Any?> {
    if (input.size == 0) return listOf(cast(value, input))
    val elements = if (value is JSONArray) List(value.length()) { value.orNull(it) } else value as List<*>? ?: List(input.size) { null }
    require(elements.size == input.size) { "${input.name} has ${elements.size} elements, not ${input.size}" }
    return elements.map { cast(it, input) }
}

private fun JSONArray.objects(): List<JSONObject> = List(length()) { getJSONObject(it) }

/** A value of an array; null for JSON's null, which org.json has as an object. */
private fun JSONArray.orNull(place: Int): Any? = if (isNull(place)) null else get(place)

/** Predicts the golden rows of the package in a folder, and compares the answers with those recorded. */
fun main(arguments: Array<String>) {
    val folder = File(arguments.firstOrNull() ?: ".")
    Predictor({ File(folder, it).readBytes() }).use { model ->
        val golden = JSONObject(File(folder, "golden.json").readText())
        val (names, output) = Pair(golden.getJSONArray("inputs"), model.manifest.getJSONArray("outputs").getJSONObject(0))
        var (rows, worst) = Pair(0, 0f)
        for (case in golden.getJSONArray("cases").objects()) {
            val data = case.getJSONObject("outputs").getJSONObject(model.file).getJSONObject(output.getString("name")).getString("data")
            val recorded = ByteBuffer.wrap(Base64.getDecoder().decode(data)).order(ByteOrder.LITTLE_ENDIAN).asFloatBuffer()
            val cases = case.getJSONArray("rows")
            val width = recorded.remaining() / cases.length()
            for (place in 0 until cases.length()) {
                val row = (0 until names.length()).associate { names.getString(it) to cases.getJSONArray(place).orNull(it) }
                val answer = model.predict(emptyMap(), row, emptyMap())
                if (rows++ == 0) println("first golden row: $answer")
                val found = answer?.values?.toList() ?: List(width) { Float.NaN }
                found.forEachIndexed { n, number ->
                    val expected = recorded[place * width + n]
                    if (!number.equals(expected)) worst = maxOf(worst, abs(number - expected).let { if (it.isNaN()) Float.POSITIVE_INFINITY else it })
                }
            }
        }
        println("$rows golden rows, largest difference $worst")
        val variant = model.manifest.getJSONArray("variants").objects().first { it.getString("file") == model.file }
        val rounding = maxOf(model.manifest.optDouble("rounding", 1e-5), variant.optDouble("rounding", 0.0))
        check(worst <= rounding) { "the answers differ from those recorded" }
    }
}
