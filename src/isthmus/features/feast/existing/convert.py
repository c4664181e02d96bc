"""Convert the entities, views and services of a Feast repository to a `definitions.py` of Isthmus."""

import json
import keyword
import re
from itertools import count
from pathlib import Path
from typing import Any

import feast
import pyarrow as pa
from feast.data_format import DeltaFormat
from feast.data_source import DataSource
from feast.infra.offline_stores.file_source import FileSource

from isthmus.features.contract.schema import RESERVED, STATUS
from isthmus.features.definition.spec import is_owner
from isthmus.features.errors import ConfigurationError, IsthmusError, Problem, first_line
from isthmus.features.feast import files
from isthmus.features.feast.existing.repository import Repository, View
from isthmus.features.feast.sources import FeastSource
from isthmus.features.feast.values import FORMS
from isthmus.features.types import SCALARS, DataType, Int64, UnixTimestamp

_PUBLIC = {"Array", "Entity", "FeatureService", "Field", "Source", "transform", *(scalar.name for scalar in SCALARS)}
_USED = {*_PUBLIC, "DataFrame", "F", "Window", "timedelta"}
_ALONE = "everything"
"""The entity of views without entities: Isthmus has no views without a key."""


class FeastDefinitions:
    """Converts a repository to the text of a `definitions.py`.

    `text` fills `left_out`: declarations without an equivalent in Isthmus, and names that changed, with reasons.
    """

    def __init__(self, repository: Repository) -> None:
        self.repository, self.left_out = repository, list[str]()
        self._variables = dict[str, str]()  # variable of a declaration, by its kind and its name in Feast
        self._parts = list[str]()
        self._features = dict[str, dict[str, str]]()  # by view: feature in Feast to feature here

    def text(self) -> str:
        registry = self.repository.registry
        for name, view in self.repository.views.items():
            try:
                if isinstance(view, IsthmusError):
                    raise view
                self._view(view)
            except IsthmusError as error:
                self.left_out.append(f"view {name}: {first_line(error)}")
        for kind, protos in (("on-demand", registry.on_demand_feature_views), ("label", registry.label_views)):
            self.left_out += [f"{kind} view {proto.spec.name}: write it by hand" for proto in protos]
        services = [feast.FeatureService.from_proto(proto) for proto in registry.feature_services]
        for service in sorted(services, key=lambda service: str(service.name)):
            self._service(service)
        text = re.sub(r"\n{4,}", "\n\n\n", "\n".join(self._parts)).strip()
        notes = "".join(f"# Left out: {' '.join(note.split())}\n" for note in self.left_out)
        used = set(re.findall(r"\w+", re.sub(r'"[^"]*"', "", text)))
        spark = [name for name in ("DataFrame", "Window") if name in used]
        return "\n".join([
            f'"""The Feast project {self.repository.project}. Each view reads the same data as in Feast."""\n',
            *["from datetime import timedelta\n"] * ("timedelta" in used),
            *[f"from pyspark.sql import {', '.join(spark)}\nfrom pyspark.sql import functions as F"] * bool(spark),
            f"\nfrom isthmus import {', '.join(sorted(used & _PUBLIC))}\n",
            *[notes] * bool(notes), text, "",
        ])  # fmt: skip

    def _variable(self, kind: str, name: str) -> tuple[str, bool]:
        """Return the variable for a declaration, and True the first time."""
        if new := f"{kind} {name}" not in self._variables:
            base = _usable(name)
            base = f"{kind}_{base}" if keyword.iskeyword(base) else base
            taken = {variable.lower() for variable in (*self._variables.values(), *_USED)}
            names = [base, f"{base}_{kind}", *(f"{base}_{kind}_{n}" for n in range(len(taken)))]
            self._variables[f"{kind} {name}"] = next(name for name in names if name.lower() not in taken)
        return self._variables[f"{kind} {name}"], new

    def _view(self, view: View) -> None:
        table, batch = view.feast, view.feast.batch_source
        fields = [(item, FORMS[str(item.dtype)].dtype) for item in table.features if str(item.dtype) in FORMS]
        self.left_out += [f"feature {view.name}:{item.name}: Isthmus has no type {item.dtype}"
                          for item in table.features if str(item.dtype) not in FORMS]  # fmt: skip
        if batch is None or not fields:
            raise _unusable(view.name, "has no source, or no feature of a type that Isthmus has")
        source, aware = self._source(view, batch)
        keys = [(item.name, FORMS[str(item.dtype)].dtype) for item in table.entity_columns if item.name in view.keys]
        names, taken = dict[str, str](), {_usable(name) for name, _ in keys}
        for name in sorted((item.name for item, _ in fields), key=lambda name: _usable(name) != name):
            base = _usable(name)
            names[name] = next(n for i in count(1) if (n := base if i == 1 else f"{base}_{i}") not in taken)
            taken.add(names[name])
        self.left_out += [
            f"the name {view.name}:{old}: the feature is {new}" for old, new in names.items() if old != new
        ]
        entities = [self._entity(*key) for key in keys or [(_ALONE, Int64)]]
        function, _ = self._variable("view", view.name)
        if function != view.name:
            self.left_out.append(f"the name {view.name}: the view is {function}, because it is a Python function")
        event, created = view.column(batch.timestamp_field), view.column(batch.created_timestamp_column or "")

        def column(name: str, dtype: DataType, alias: str = "") -> str:
            return f'F.col({_text(name)}).cast("{dtype.spark}").alias({_text(alias or name)})'

        # A timestamp declared in `Source` keeps its name.
        selected = [column(view.column(name), dtype, _usable(name)) for name, dtype in keys]
        selected += [] if keys else [f'F.lit(0).cast("bigint").alias("{_ALONE}")']
        selected += [_text(event) if aware else column(event, UnixTimestamp, "event_timestamp")]
        selected += [column(view.column(item.name), dtype, names[item.name]) for item, dtype in fields]
        # In Feast, the created time only chooses between rows with the same event time. It hides no row.
        by = ", ".join(map(_text, [*(view.column(name) for name, _ in keys), event]))
        order = [f"F.col({_text(created)}).desc()"] if created else []
        order += [_text(view.column(item.name)) for item, _ in fields]
        body = (
            f"    newest = Window.partitionBy({by}).orderBy({', '.join(order)})\n"
            f'    latest = {source}.withColumn("_version", F.row_number().over(newest)).where("_version = 1")\n'
        )
        seconds = table.ttl.total_seconds() if table.ttl else 0
        ttl = f"timedelta({f'days={seconds / 86400:g}' if seconds % 86400 == 0 else f'seconds={seconds!r}'})"
        about = (table.description or f"The rows of {source}.").splitlines()[0].replace("\\", "/").replace('"', "'")
        schema = "".join(f"        {_field(names[item.name], dtype, item.description)},\n" for item, dtype in fields)
        owner = f"    owner={_text(table.owner)},\n" if table.owner and is_owner(table.owner) else ""
        self._parts.append(
            f"\n\n@transform(\n    entities=[{', '.join(entities)}],\n    sources=[{source}],\n"
            f"    ttl={ttl if seconds else None},\n    schema=[\n{schema}    ],\n{owner})\n"
            f'def {function}({source}: DataFrame) -> DataFrame:\n    """{about}"""\n{body}'
            f"    return latest.select(\n{''.join(f'        {item},{chr(10)}' for item in selected)}    )\n\n"
        )
        self._features[view.name] = names

    def _source(self, view: View, batch: DataSource) -> tuple[str, bool]:
        """Return the variable for a source, and True if its event time has a time zone.

        Raise ConfigurationError unless it reads files or PostgreSQL.
        """
        event, aware = view.column(batch.timestamp_field), True
        if isinstance(batch, FileSource):
            found = FeastSource(batch, self.repository.folder, (), (), "", "")
            with self.repository.reaching(found.where):
                kind = found.data.schema.field(event).type
            path, aware = files.path_of(batch, self.repository.folder), pa.types.is_timestamp(kind) and bool(kind.tz)
            delta = isinstance(batch.file_format, DeltaFormat)
            place = path if "://" in path else str(Path(path).resolve())
            options = f"{'delta' if delta else 'path'}={_text(place)}"
        elif type(batch).__name__ == "PostgreSQLSource":
            table = batch.get_table_query_string()
            query = table[1:-1] if table.startswith("(") else f"SELECT * FROM {table}"  # noqa: S608 - as Feast asks
            options = f'sql={_text(query)}, connection="FEAST_DATABASE"'
        else:
            raise _unusable(view.name, f"reads a {type(batch).__name__}")
        variable, new = self._variable("source", batch.name or "source")
        if new:
            stamp = f", timestamp={_text(event)}" if aware else ""
            self._parts.append(f"{variable} = Source({_text(variable)}, {options}{stamp})")
        return variable, aware

    def _entity(self, key: str, dtype: DataType) -> str:
        specs = {proto.spec.join_key: proto.spec for proto in self.repository.registry.entities}
        name, about = (specs[key].name, specs[key].description) if key in specs else (key, "")
        variable, new = self._variable("entity", name)
        if new:
            described = f", description={_text(about)}" if about else ""
            self._parts.append(
                f"{variable} = Entity({_text(name)}, join_keys={{{_text(_usable(key))}: {dtype!r}}}{described})"
            )
        return variable

    def _service(self, service: Any) -> None:
        parts = []
        for part in service.feature_view_projections:
            known = self._features.get(part.name, {})
            names = [known[item.name] for item in part.features if item.name in known]
            if names:
                view, _ = self._variable("view", part.name)
                parts.append(view if names == [*known.values()] else f"{view}[{_text(names)}]")
        if not parts:
            self.left_out.append(f"service {service.name}: none of its features is left")
            return
        variable, _ = self._variable("service", service.name)
        about = f", description={_text(service.description)}" if service.description else ""
        self._parts.append(f"{variable} = FeatureService({_text(service.name)}, features=[{', '.join(parts)}]{about})")


def _field(name: str, dtype: DataType, about: str) -> str:
    return f"Field({_text(name)}, {dtype!r}{f', description={_text(about)}' if about else ''})"


def _usable(name: str) -> str:
    """Return a name that Isthmus accepts: a letter, then letters, digits and _, and not a reserved column."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", name)
    name = name if name[0].isalpha() else f"x{name}"
    return f"{name}_" if name in (*RESERVED, STATUS) else name


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _unusable(view: str, found: str) -> ConfigurationError:
    problem = Problem(f"view {view}", found, "files, or a table or query of PostgreSQL")
    return ConfigurationError("Feast repository", [problem])
