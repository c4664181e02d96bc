// Stored features on a device: fetched whole or as a delta, verified, stored, and read with their expiry.
//
// For Android from API level 26 and for the JVM, without a library. Isthmus describes the files in docs/snapshots.md.

package isthmus

import java.io.ByteArrayOutputStream
import java.io.File
import java.io.FileOutputStream
import java.io.IOException
import java.io.InputStream
import java.io.RandomAccessFile
import java.math.BigInteger
import java.net.HttpURLConnection
import java.net.URL
import java.net.URLEncoder
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.nio.charset.CharacterCodingException
import java.nio.file.Files
import java.nio.file.StandardCopyOption.ATOMIC_MOVE
import java.security.KeyFactory
import java.security.MessageDigest
import java.security.PublicKey
import java.security.Signature
import java.security.SignatureException
import java.security.interfaces.ECPublicKey
import java.security.spec.X509EncodedKeySpec
import java.time.Instant
import java.util.Base64
import java.util.Locale

private val TAGS = mapOf("Bool" to 'b', "Int32" to 'i', "Int64" to 'i', "UnixTimestamp" to 't', "String" to 's', "Bytes" to 'y')
private val WIDTHS = mapOf("Bool" to 1, "Int32" to 4, "Int64" to 8, "UnixTimestamp" to 8, "Float32" to 4, "Float64" to 8)
private val TRUTHS = mapOf<String, Byte>("true" to 1, "1" to 1, "false" to 0, "0" to 0)
private const val SIGNATURE = 64
private const val LARGEST = 1 shl 26
private const val SLACK = 300_000_000L

/** The reason a snapshot is refused or cannot be used, in a sentence. [kind] is for programs. */
class SnapshotError(val kind: String, message: String, cause: Throwable? = null) : Exception(message, cause)

/** A view of which a device has rows: join keys and features, each with its type. [ttl] is in microseconds. */
class DeviceView(val name: String, val keys: List<Pair<String, String>>, val fields: List<Pair<String, String>>, val ttl: Long?)

/** What a device stores to feed a model. [age] is in microseconds. Of the join key [owner] a device has one value. */
class Device(
    val project: String, val service: String, val hash: String, val age: Long, val views: List<DeviceView>, val owner: String? = null,
) {
    companion object {
        /** The `device` of a package, from the bytes of its manifest.json. */
        fun of(manifest: ByteArray): Device = Json(utf8(manifest)).read().at("device").run {
            fun pairs(view: Any?, name: String) = view.at(name).list().map { Pair(it.list()[0] as String, it.list()[1] as String) }
            val views = at("views").list().map {
                DeviceView(it.at("name") as String, pairs(it, "keys"), pairs(it, "fields"), it.at("ttl") as Long?)
            }
            Device(
                at("project") as String, at("service") as String, at("hash") as String, at("age") as Long, views, at("owner") as String?,
            )
        }
    }
}

enum class Status(val text: String) { PRESENT("present"), NULL("null"), EXPIRED("expired"), NOT_FOUND("not_found") }

/**
 * A row of a view; [event] and [known] are microseconds since 1970 UTC.
 *
 * [values] has each feature: a Boolean, Int, Long (of a UnixTimestamp microseconds since 1970 UTC), Float, Double,
 * String, ByteArray, a List of these, or null.
 */
class Row(val status: Status, val event: Long?, val known: Long?, val values: Map<String, Any?>)

/**
 * The snapshots of a model's service on this device. Several threads may use it.
 *
 * @param device `device` of the package's manifest.
 * @param url address of the snapshot, on a server or as a file.
 * @param key public key in PEM that the snapshot must be signed with.
 * @param folder for the last good snapshot, which is checked when it is opened; created if it is missing.
 * @param files true if deltas are files next to it, as written by `isthmus features snapshot --to`.
 * @param headers headers to send with each request, such as an API key.
 * @param owner value of the join key that the device names as owner; only if it names one.
 * @param now current time in microseconds since 1970 UTC.
 */
class Snapshots(
    private val device: Device,
    url: String,
    key: String,
    private val folder: File,
    private val files: Boolean = false,
    private val headers: Map<String, String> = emptyMap(),
    owner: Any? = null,
    private val now: () -> Long = { System.currentTimeMillis() * 1000 },
) {
    private val signer = publicKey(key)
    private val owner = ownerOf(device, owner)
    private val url = if (this.owner == null) url else "$url/${encoded(this.owner.text)}"
    private val layouts = device.views.associate { it.name to Layout(it) }

    // After a change of user, the previous user's snapshot is neither used nor in the way.
    private val name = listOfNotNull(device.project, device.service, device.hash, this.owner?.text).joinToString("/")
    private val file = File(folder, hex(sha256(name.toByteArray())) + ".snapshot")

    @Volatile
    private var state: Snapshot? = null

    /** The reason the last fetched or stored snapshot was refused; the previous valid one stays in use. */
    @Volatile
    var problem: SnapshotError? = null
        private set

    init {
        adopt()
    }

    /** SHA-256 of the current snapshot in hexadecimal; null without one. */
    val digest: String? get() = state?.digest

    /** Age of the current snapshot in microseconds; null without one. */
    val age: Long? get() = state?.let { now() - it.made }

    /**
     * Fetches what is newer, and returns whether there was something. It waits for the network and for its turn: call it
     * on a thread of its own.
     *
     * @throws SnapshotError if a newer snapshot cannot be used; the device then keeps its current one.
     */
    fun update(): Boolean = inTurn { fetched()?.let(::take) ?: false }

    /**
     * Uses a snapshot, or a delta from the current one, that came with the app or was pushed.
     *
     * @throws SnapshotError as [update].
     */
    fun accept(bytes: ByteArray): Boolean = inTurn {
        take(if (begins(bytes, "isthdiff")) applied(state?.bytes ?: ByteArray(0), bytes) else bytes)
    }

    /** Throws a [SnapshotError] unless the snapshot in use may feed the model now. */
    fun require() {
        val used = state ?: throw problem ?: SnapshotError("none", "this device has no snapshot yet")
        val at = now()
        if (at - used.made < -SLACK) throw ofTheFuture(used, at)
        if (at - used.made > device.age) {
            val (old, allowed) = Pair(span(at - used.made), span(device.age))
            throw SnapshotError("age", "the stored features are $old old, of ${moment(used.made)}; this model may use $allowed")
        }
    }

    /** The row of a view for join keys, by name: whole numbers, Booleans or text for each, and a ByteArray for bytes. */
    fun row(view: String, keys: Map<String, Any?>): Row {
        val used = state
        return row(device.views.first { it.name == view }, keys, used, present(used))
    }

    /** The stored features of a row of join keys, by the names of a model's inputs. */
    fun features(keys: Map<String, Any?>): Map<String, Any?> {
        val used = state
        val at = present(used)
        return device.views.flatMap { view ->
            row(view, keys, used, at).values.map { (name, value) -> "${view.name}__$name" to value }
        }.toMap()
    }

    /** The time of a read: the time of the snapshot if this device's clock is slightly behind it. */
    private fun present(used: Snapshot?): Long {
        val at = now()
        return if (used != null && at < used.made && used.made - at <= SLACK) used.made else at
    }

    private fun row(view: DeviceView, keys: Map<String, Any?>, used: Snapshot?, at: Long): Row {
        val layout = layouts.getValue(view.name)
        val key = keyOf(view, keys, owner)
        val nothing = layout.fields.associate { it.name to null }
        val row = used?.rows?.getValue(view.name)?.get(key) ?: return Row(Status.NOT_FOUND, null, null, nothing)
        val (event, known) = Pair(row.getLong(0), row.getLong(8))
        if (event > at || known > at) return Row(Status.NOT_FOUND, event, known, nothing)
        // As a number without a sign, the difference of any two moments fits.
        val expired = view.ttl != null && (at - event).toULong() > view.ttl.toULong()
        if (expired) return Row(Status.EXPIRED, event, known, nothing)
        val values = layout.fields.associate { it.name to layout.value(row, it) }
        return Row(if (values.values.all { it == null }) Status.NULL else Status.PRESENT, event, known, values)
    }

    private fun <T> inTurn(work: () -> T): T = synchronized(TURNS) {
        adopt()
        try {
            work().also { problem = null }
        } catch (error: SnapshotError) {
            problem = error
            throw error
        }
    }

    /** Loads the stored snapshot, which another process may have replaced. */
    private fun adopt() {
        if (!file.exists()) return
        try {
            val bytes = file.readBytes()
            if (hex(sha256(bytes)) != state?.digest) state = checked(bytes, timely = false)
        } catch (error: IOException) {
            problem = SnapshotError("store", "the stored snapshot cannot be read: ${error.message}", error)
        } catch (error: SnapshotError) {
            problem = error
        }
    }

    /**
     * Verifies that bytes are a snapshot for this device, not older than its current one. What is stored
     * stays known whatever the clock says, so that nothing older can take its place.
     */
    private fun checked(bytes: ByteArray, timely: Boolean = true): Snapshot {
        if (!signed(bytes, signer)) {
            throw SnapshotError("signature", "the snapshot is not signed by the key of this model, or was altered since")
        }
        val fresh = read(bytes, device, layouts, owner)
        val (had, at) = Pair(state, now())
        if (had != null && (fresh.number < had.number || (fresh.number == had.number && fresh.digest != had.digest))) {
            throw SnapshotError("older", "the snapshot is of ${moment(fresh.made)}; this device has had one of ${moment(had.made)}")
        }
        if (timely && fresh.made > at + SLACK) throw ofTheFuture(fresh, at)
        return fresh
    }

    private fun take(bytes: ByteArray): Boolean = alone {
        // Another process may have stored something newer while this one fetched.
        adopt()
        val fresh = checked(bytes)
        val newer = fresh.digest != state?.digest
        if (newer) {
            store(bytes)
            state = fresh
        }
        newer
    }

    /** Runs work while no other process of the app does; the system ends the lock of a process that ends. */
    private fun <T> alone(work: () -> T): T {
        folder.mkdirs()
        val turn = try {
            RandomAccessFile(File(folder, file.name + "-lock"), "rw")
        } catch (error: IOException) {
            throw SnapshotError("store", "the new snapshot cannot be stored: ${error.message}", error)
        }
        return turn.use {
            it.channel.lock()
            work()
        }
    }

    /** Written beside and renamed: at any moment the file is the old one or the new one. */
    private fun store(bytes: ByteArray) {
        var part: File? = null
        try {
            folder.mkdirs()
            // A killed process may have left a partial file.
            folder.listFiles { left -> left.name.startsWith(file.name + ".") }?.forEach { it.delete() }
            part = File.createTempFile(file.name + ".", null, folder)
            FileOutputStream(part).use {
                it.write(bytes)
                it.fd.sync()
            }
            Files.move(part.toPath(), file.toPath(), ATOMIC_MOVE)
        } catch (error: IOException) {
            part?.delete()
            throw SnapshotError("store", "the new snapshot cannot be stored: ${error.message}", error)
        }
    }

    /** Fetches the bytes of a newer snapshot or delta; null if there is none. */
    private fun fetched(): ByteArray? {
        val used = state ?: return ask(url, null)
        try {
            val place = if (files) "$url.${used.digest.take(16)}" else "$url?since=${used.digest}"
            val answer = ask(place, used.digest) ?: return null
            return if (begins(answer, "isthdiff")) applied(used.bytes, answer) else answer
        } catch (error: SnapshotError) {
            if (error.kind == "offline") throw error
            // If the delta fails for any reason, fetch the whole file.
            return ask(url, null)
        }
    }

    private fun ask(place: String, has: String?): ByteArray? {
        val connection = URL(place).openConnection() as HttpURLConnection
        try {
            connection.connectTimeout = 10_000
            connection.readTimeout = 30_000
            connection.useCaches = false
            headers.forEach(connection::setRequestProperty)
            if (has != null) connection.setRequestProperty("If-None-Match", "\"$has\"")
            val status = connection.responseCode
            if (status == HttpURLConnection.HTTP_NOT_MODIFIED) return null
            if (status !in 200..299) throw SnapshotError("refused", "the snapshot cannot be fetched: $status")
            return connection.inputStream.use(::limited)
        } catch (error: IOException) {
            throw SnapshotError("offline", "the snapshot cannot be fetched: there is no connection", error)
        } finally {
            connection.disconnect()
        }
    }

    /** Reads a stream; throws if it is larger than a snapshot may be. */
    private fun limited(stream: InputStream): ByteArray {
        val bytes = ByteArrayOutputStream()
        val part = ByteArray(1 shl 16)
        while (true) {
            val count = stream.read(part)
            if (count < 0) return bytes.toByteArray()
            if (bytes.size() + count > LARGEST) throw SnapshotError("size", "the snapshot has more than $LARGEST bytes")
            bytes.write(part, 0, count)
        }
    }

    private companion object {
        /** Updates in this process run one at a time, so that none overwrites a newer snapshot. */
        val TURNS = Any()
    }
}

/** A checked snapshot: view to key to row; keys are bytes as Latin-1, which compares them whole. */
private class Snapshot(
    val bytes: ByteArray, val digest: String, val made: Long, val number: Long, val rows: Map<String, Map<String, ByteBuffer>>
)

private class Field(val name: String, val type: String, val bit: Int, val place: Int, val isFixed: Boolean)

/** Offsets in a row: two times, null bits, values of fixed width, then the ends of the other values. */
private class Layout(view: DeviceView) {
    val fields: List<Field>
    val ends: Int
    val others: Int
    val width: Int

    init {
        var place = 16 + (view.fields.size + 7) / 8
        var other = 0
        fields = view.fields.mapIndexed { bit, (name, type) ->
            val size = WIDTHS[type]
            Field(name, type, bit, if (size == null) other++ else place, size != null).also { place += size ?: 0 }
        }
        ends = place
        others = other
        width = place + 4 * other
    }

    /** The value of a field, or null. */
    fun value(row: ByteBuffer, field: Field): Any? {
        if ((row.get(16 + field.bit / 8).toInt() shr (field.bit % 8)) and 1 == 1) return null
        if (field.isFixed) return fixed(row, field.place, field.type)
        val begin = if (field.place == 0) 0 else row.getInt(ends + 4 * (field.place - 1))
        val end = row.getInt(ends + 4 * field.place)
        if (begin < 0 || end < begin || end > row.limit() - width) throw torn("the ends within a row are out of order")
        val bytes = row.array().copyOfRange(row.arrayOffset() + width + begin, row.arrayOffset() + width + end)
        val element = field.type.removeSurrounding("Array(", ")")
        return if (element == field.type) other(bytes, element) else elements(bytes, element)
    }

    private fun elements(bytes: ByteArray, type: String): List<Any> {
        val row = ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN)
        val items = mutableListOf<Any>()
        while (row.hasRemaining()) {
            val size = WIDTHS[type] ?: if (row.remaining() < 4) -1 else row.getInt()
            if (size < 0 || size > row.remaining()) throw torn("an array ends within an element")
            val begin = row.position()
            items += if (type in WIDTHS) fixed(row, begin, type) else other(bytes.copyOfRange(begin, begin + size), type)
            row.position(begin + size)
        }
        return items
    }

    private fun other(bytes: ByteArray, type: String): Any = if (type == "String") utf8(bytes) else bytes

    private fun fixed(row: ByteBuffer, place: Int, type: String): Any = when (type) {
        "Bool" -> row.get(place) != 0.toByte()
        "Int32" -> row.getInt(place)
        "Float32" -> row.getFloat(place)
        "Float64" -> row.getDouble(place)
        else -> row.getLong(place)
    }
}

/** The owner of a device's snapshots: join key, value as text, and encoded value. */
private class Owner(val name: String, val text: String, val key: String)

/** A file whose signature was checked, if it is a snapshot for this device. */
private fun read(bytes: ByteArray, device: Device, layouts: Map<String, Layout>, owner: Owner?): Snapshot {
    val data = ByteBuffer.wrap(bytes).order(ByteOrder.LITTLE_ENDIAN)
    val end = bytes.size - SIGNATURE
    if (end < 13 || !begins(bytes, "isthsnap")) throw torn("it does not begin as one")
    if (bytes[8] != 1.toByte()) throw SnapshotError("version", "the snapshot has version ${bytes[8]}; expected 1")
    val size = data.getInt(9)
    if (size < 0 || size > end - 13) throw torn("it ends within its header")
    val header = Json(utf8(bytes.copyOfRange(13, 13 + size))).read()
    for ((name, expected) in listOf("project" to device.project, "service" to device.service, "hash" to device.hash)) {
        if (header.at(name) == expected) continue
        val (found, wanted) = Pair("${header.at(name)}".take(12), expected.take(12))
        throw SnapshotError("contract", "the snapshot is of $name $found; this model was made for $wanted")
    }
    val counts = header.at("views").list().map { Pair(it.list().first(), it.list().last() as? Long ?: 0L) }
    if (counts.map { it.first } != device.views.map { it.name }) {
        val (found, wanted) = Pair(counts.joinToString { "${it.first}" }, device.views.joinToString { it.name })
        throw SnapshotError("contract", "the snapshot is of views $found; expected $wanted")
    }
    val (has, wanted) = Pair(header.at("owner").list(), listOfNotNull(owner?.name, owner?.text))
    if (has != wanted) throw SnapshotError("owner", "the snapshot is ${whose(has)}; expected one ${whose(wanted)}")
    data.limit(end).position(13 + size)
    val rows = device.views.zip(counts).associate { (view, count) ->
        view.name to try {
            (0 until count.second).associate { row(data, bytes, view, layouts.getValue(view.name)) }
        } catch (error: RuntimeException) { // beyond the end
            throw torn("it ends within a row of ${view.name}", error)
        }
    }
    if (data.hasRemaining()) throw torn("it has another length than its header says")
    val (made, number) = Pair(header.at("made"), header.at("number"))
    if (made !is Long || number !is Long) throw torn("its header has no time or no number")
    return Snapshot(bytes, hex(sha256(bytes)), made, number, rows)
}

/** The key and the row that follow; a RuntimeException if none do. */
private fun row(data: ByteBuffer, bytes: ByteArray, view: DeviceView, layout: Layout): Pair<String, ByteBuffer> {
    val begin = data.position()
    for ((_, type) in view.keys) {
        if (data.get() != TAGS.getValue(type).code.toByte()) throw torn("no key of ${view.name} at byte $begin")
        val size = WIDTHS[type]?.let { if (it == 1) 1 else 8 } ?: data.getInt()
        data.position(data.position() + size)
    }
    val row = data.position()
    val others = if (layout.others == 0) 0 else data.getInt(row + layout.width - 4)
    require(others >= 0)
    data.position(row + layout.width + others)
    val content = ByteBuffer.wrap(bytes, row, data.position() - row).slice().order(ByteOrder.LITTLE_ENDIAN)
    return Pair(String(bytes, begin, row - begin, Charsets.ISO_8859_1), content)
}

private fun whose(owner: List<Any?>) = if (owner.isEmpty()) "for all users" else "of ${owner.joinToString(" ")}"

/** Encodes the key of a row: each join key in the order of the manifest. */
private fun keyOf(view: DeviceView, keys: Map<String, Any?>, owner: Owner?): String = view.keys.joinToString("") { (name, type) ->
    val value = keys[name]
    if (value == null || value == "") throw SnapshotError("key", "${view.name} needs the key $name")
    val part = partOf(name, type, value)
    // This device does not have these rows, so "not found" would be wrong.
    if (owner?.name == name && part != owner.key) {
        throw SnapshotError("owner", "this device has the rows of $name ${owner.text} alone; it was asked for $value")
    }
    part
}

/** Encodes a join key in the key of a row. */
private fun partOf(name: String, type: String, value: Any): String {
    val bytes = when (type) {
        "Bool" -> byteArrayOf(TRUTHS[value.toString()] ?: throw SnapshotError("key", "the key $name is $value; expected a truth value"))
        "String", "Bytes" -> (value as? ByteArray ?: value.toString().toByteArray()).let { little(4).putInt(it.size).array() + it }
        else -> {
            val whole = value.toString().toLongOrNull()
            little(8).putLong(whole ?: throw SnapshotError("key", "the key $name is $value; expected a whole number")).array()
        }
    }
    return TAGS.getValue(type) + String(bytes, Charsets.ISO_8859_1)
}

/** The owner of a device's snapshots; null if all devices have the same rows. */
private fun ownerOf(device: Device, value: Any?): Owner? {
    val (name, isMissing) = Pair(device.owner, value == null || value == "")
    if (name == null) {
        return if (isMissing) null else throw SnapshotError("owner", "the snapshots of ${device.service} are for all users; expected no owner")
    }
    if (value == null || isMissing) {
        throw SnapshotError("owner", "the snapshots of ${device.service} are of one $name each; expected that of this device as owner")
    }
    val (_, type) = device.views.flatMap { it.keys }.first { it.first == name }
    val key = partOf(name, type, value)
    val text = when (type) {
        "Bool" -> "${key.last() == '\u0001'}"
        "Bytes" -> Base64.getEncoder().encodeToString(key.drop(5).toByteArray(Charsets.ISO_8859_1))
        "String" -> value.toString()
        else -> "${value.toString().toLong()}"
    }
    return Owner(name, text, key)
}

private fun encoded(text: String) = URLEncoder.encode(text, "UTF-8").replace("+", "%20")

/** Applies a delta to a file and returns the new file. */
private fun applied(base: ByteArray, delta: ByteArray): ByteArray {
    if (delta.size < 77 || delta[8] != 1.toByte()) throw torn("what was fetched is no difference")
    if (!delta.copyOfRange(9, 41).contentEquals(sha256(base))) throw torn("the difference is for another snapshot")
    val steps = ByteBuffer.wrap(delta).order(ByteOrder.LITTLE_ENDIAN)
    val size = steps.getInt(73)
    steps.position(77)
    val made = ByteBuffer.allocate(if (size in 0..LARGEST) size else throw torn("the difference leads to $size bytes"))
    try {
        while (steps.hasRemaining()) {
            val step = number(steps)
            val count = (step / 2).toInt()
            if (step % 2 == 1L) {
                made.put(base, number(steps).toInt(), count)
            } else {
                made.put(delta, steps.position(), count)
                steps.position(steps.position() + count)
            }
        }
    } catch (error: RuntimeException) { // beyond an end
        throw torn("the difference leads beyond its end", error)
    }
    if (made.hasRemaining() || !delta.copyOfRange(41, 73).contentEquals(sha256(made.array()))) {
        throw torn("the difference does not lead to what it names")
    }
    return made.array()
}

/** A number of at most five bytes in LEB128. */
private fun number(bytes: ByteBuffer): Long {
    var value = 0L
    for (shift in 0 until 35 step 7) {
        val byte = bytes.get().toLong()
        value = value or ((byte and 127) shl shift)
        if (byte >= 0) return value
    }
    throw IllegalArgumentException("a number has more than five bytes")
}

/** Checks the signature of these bytes. Java wants r and s as a DER sequence of two integers. */
private fun signed(bytes: ByteArray, owner: PublicKey): Boolean {
    val end = bytes.size - SIGNATURE
    if (end <= 0) return false
    val integers = listOf(end, end + 32).map { BigInteger(1, bytes.copyOfRange(it, it + 32)).toByteArray() }
    val content = integers.map { byteArrayOf(2, it.size.toByte()) + it }.reduce(ByteArray::plus)
    return try {
        Signature.getInstance("SHA256withECDSA").run {
            initVerify(owner)
            update(bytes, 0, end)
            verify(byteArrayOf(48, content.size.toByte()) + content)
        }
    } catch (_: SignatureException) {
        false
    }
}

private fun publicKey(pem: String): PublicKey {
    val der = Base64.getDecoder().decode(pem.replace(Regex("-----[^-]+-----|\\s"), ""))
    return KeyFactory.getInstance("EC").generatePublic(X509EncodedKeySpec(der)).also {
        require((it as ECPublicKey).params.curve.field.fieldSize == 256) { "the public key is not of the curve P-256" }
    }
}

/** JSON as maps, lists, text, Longs, Doubles, Booleans and null. */
internal class Json(text: String) {
    // Text with its escapes, or a number, a word or a sign.
    private val tokens = Regex(""""(?:[^"\\]++|\\.)*+"|[^\s"\[\]{},:]+|[\[\]{},:]""").findAll(text).map { it.value }.toList()
    private var next = 0

    fun read(): Any? = try {
        value().also { require(next == tokens.size) }
    } catch (error: RuntimeException) {
        throw torn("its header is not JSON", error)
    }

    private fun value(): Any? = when (val token = tokens[next++]) {
        "{" -> all("}") { val name = value() as String; require(tokens[next++] == ":"); name to value() }.toMap()
        "[" -> all("]") { value() }
        "true", "false" -> token == "true"
        "null" -> null
        else -> if (token[0] == '"') text(token) else token.toLongOrNull() ?: token.toDouble()
    }

    private fun <T> all(end: String, item: () -> T): List<T> {
        val items = mutableListOf<T>()
        while (tokens[next] != end) {
            if (items.isNotEmpty()) require(tokens[next++] == ",")
            items += item()
        }
        next++
        return items
    }

    private fun text(token: String): String = Regex("""\\(u([0-9a-fA-F]{4})|.)""").replace(token.substring(1, token.length - 1)) {
        val (escape, code) = it.destructured
        if (code.isNotEmpty()) code.toInt(16).toChar().toString() else ESCAPES[escape] ?: escape
    }

    private companion object {
        val ESCAPES = mapOf("n" to "\n", "t" to "\t", "r" to "\r", "b" to "\b", "f" to "\u000c")
    }
}

internal fun Any?.at(name: String): Any? = (this as? Map<*, *>)?.get(name)

internal fun Any?.list(): List<Any?> = this as? List<*> ?: emptyList<Any?>()

private fun torn(why: String, cause: Throwable? = null) = SnapshotError("torn", "the snapshot is torn or damaged: $why", cause)

private fun ofTheFuture(snapshot: Snapshot, at: Long) =
    SnapshotError("clock", "the snapshot is of ${moment(snapshot.made)}, and this device says it is ${moment(at)}")

private fun moment(micros: Long) = Instant.ofEpochSecond(micros / 1_000_000).toString().replace("T", " ").replace("Z", " UTC")

private fun span(micros: Long): String {
    val seconds = micros / 1_000_000
    val units = listOf("days" to 86_400L, "hours" to 3_600L, "minutes" to 60L)
    val (unit, size) = units.firstOrNull { seconds >= 2 * it.second } ?: ("seconds" to 1L)
    return "${(seconds + size / 2) / size} $unit"
}

private fun begins(bytes: ByteArray, magic: String) = bytes.size >= 8 && String(bytes, 0, 8, Charsets.ISO_8859_1) == magic

private fun little(size: Int): ByteBuffer = ByteBuffer.allocate(size).order(ByteOrder.LITTLE_ENDIAN)

private fun sha256(bytes: ByteArray): ByteArray = MessageDigest.getInstance("SHA-256").digest(bytes)

private fun hex(bytes: ByteArray) = bytes.joinToString("") { "%02x".format(Locale.ROOT, it) }

private fun utf8(bytes: ByteArray): String = try {
    Charsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(bytes)).toString()
} catch (error: CharacterCodingException) {
    throw torn("a text is not UTF-8", error)
}
