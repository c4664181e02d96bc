// Holds Snapshots.kt to tests/fixtures/snapshots.json, or does to a server's snapshots what it reads line by line.

package isthmus

import java.io.File
import java.nio.file.Files
import java.util.Base64
import kotlin.system.exitProcess

fun main(arguments: Array<String>) {
    val vectors = File(arguments[0]).readBytes()
    val content = Json(String(vectors)).read()
    val (device, key) = Pair(Device.of(vectors), content.at("key") as String)
    val of = { name: Any? -> Device.of((content.at("manifests").at(name as String) as String).toByteArray()) }
    if (arguments.size > 1) {
        val own = arguments.getOrNull(4)?.let { of("carrier") } ?: device
        return follow(Snapshots(own, arguments[1], key, File(arguments[2]), owner = arguments.getOrNull(4), now = { arguments[3].toLong() }))
    }
    @Suppress("UNCHECKED_CAST")
    val files = (content.at("files") as Map<Any?, Any?>).mapValues { Base64.getDecoder().decode(it.value as String) }
    var (passed, failed) = Pair(0, 0)
    for (case in content.at("cases").list()) {
        var time = 0L
        val folder = Files.createTempDirectory("cases").toFile()
        val mine = case.at("of")?.let(of) ?: device
        val types = device.views.flatMap { it.keys }.toMap()
        val open = { owner: String? ->
            val value = owner?.let { key(types[mine.owner] ?: "String", it) }
            Snapshots(mine, "http://127.0.0.1:1/", key, folder, owner = value, now = { time })
        }
        var whose = case.at("owner") as String?
        var snapshots = open(whose)
        for (step in case.at("steps").list()) {
            time = (step.at("now") as String).toLong()
            val answer = answered {
                if (step.at("do") != "open") done(snapshots, device, step, files) else {
                    snapshots = open(step.at("owner") as String?)
                    whose = step.at("owner") as String?
                    "opened"
                }
            }
            if (answer == step.at("answer")) passed++ else failed++.also { println("${case.at("name")}: $answer; expected ${step.at("answer")}") }
        }
        time = 4_000_000_000_000_000
        val again = open(whose)
        if (again.digest == snapshots.digest) passed++ else failed++.also { println("${case.at("name")}: opened anew, ${again.digest}") }
        folder.deleteRecursively()
    }
    println("$passed passed, $failed failed")
    exitProcess(if (failed == 0) 0 else 1)
}

private fun done(snapshots: Snapshots, device: Device, step: Any?, files: Map<Any?, ByteArray>): Any? {
    val types = device.views.flatMap { it.keys }.toMap()
    val keys = (step.at("keys") as? Map<*, *>).orEmpty().map { (name, value) -> name as String to key(types.getValue(name), value as String) }.toMap()
    return when (step.at("do")) {
        "accept" -> if (snapshots.accept(files.getValue(step.at("file")))) "newer" else "same"
        "require" -> "fit".also { snapshots.require() }
        "row" -> snapshots.row(step.at("view") as String, keys).let {
            val values = it.values.mapValues { (_, value) -> shown(value) }
            mapOf("status" to it.status.text, "event" to it.event?.toString(), "known" to it.known?.toString(), "values" to values)
        }
        else -> snapshots.features(keys).mapValues { (_, value) -> shown(value) }
    }
}

private fun key(type: String, text: String): Any = when {
    type == "Bytes" -> text.chunked(2).map { it.toInt(16).toByte() }.toByteArray()
    type == "Bool" -> text == "1"
    else -> text
}

private fun answered(work: () -> Any?): Any? = try {
    work()
} catch (error: SnapshotError) {
    error.kind
}

private fun shown(value: Any?): Any? = when (value) {
    null -> null
    is Boolean -> if (value) "1" else "0"
    is Float -> "%08x".format(value.toBits())
    is Double -> "%016x".format(value.toBits())
    is ByteArray -> value.joinToString("") { "%02x".format(it) }
    is List<*> -> value.map { shown(it) }
    else -> value.toString()
}

private fun follow(snapshots: Snapshots) {
    println("digest ${snapshots.digest} ${snapshots.problem?.kind}")
    for (line in generateSequence(::readlnOrNull)) {
        val words = line.split(" ")
        val answer = answered {
            when (words[0]) {
                "update" -> snapshots.update()
                "forever" -> while (true) snapshots.update()
                "at_once" -> List(8) { kotlin.concurrent.thread { snapshots.update() } }.forEach { it.join() }.let { snapshots.digest }
                "require" -> "fit".also { snapshots.require() }
                "digest" -> snapshots.digest
                else -> snapshots.row("one", mapOf("carrier" to words[1])).let { "${it.status.text} ${it.values["n"]} ${it.values["text"]}" }
            }
        }
        println(answer)
    }
}
