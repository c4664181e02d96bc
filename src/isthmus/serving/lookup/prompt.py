"""`Prompt`: looks up the features in a model's prompt template, and formats them as text."""

from collections.abc import Callable, Mapping, Sequence

import orjson

from isthmus.features.contract.schema import Contract
from isthmus.features.errors import RequestError
from isthmus.features.online.plan import LookupPlan, ViewAnswer
from isthmus.features.request.graph import RowGraph
from isthmus.features.values.columns import Values
from isthmus.package.generation.prompt import Generation, format_feature, prompt_features
from isthmus.serving.limits import Limits
from isthmus.serving.lookup.lookup import Lookup, LookupInputs
from isthmus.serving.wire import decode
from isthmus.serving.wire.encode import OPTIONS, json_columns
from isthmus.serving.wire.errors import TooLargeError
from isthmus.serving.wire.messages import GenerateRequest


class Prompt:
    """The features in a model's prompt template: a plan to read them, and their text."""

    def __init__(
        self, generation: Generation, contract: Contract, service: str, *, graphs: Callable[[str], RowGraph],
        earlier: Sequence[Contract] = (),
    ) -> None:  # fmt: skip
        self._missing, self._lookup = generation.missing, None
        self.plan: LookupPlan
        self.bits: Mapping[str, bytes]
        if generation.features:
            known = prompt_features(contract, service)
            features = [known[name] for name in generation.features]
            self._lookup = Lookup(contract, features, full_names=True, graphs=graphs, earlier=earlier)
            self.plan, self.bits = self._lookup.plan, self._lookup.bits
        else:
            self.plan, self.bits = LookupPlan(contract, []), {}

    def read(self, message: GenerateRequest, limits: Limits) -> LookupInputs:
        lookup = self._lookup
        if lookup is None:
            if message.entities:
                raise RequestError(f"entities.{next(iter(message.entities))}", "is not used by the prompt's features",
                                   expected="no entities")  # fmt: skip
            return LookupInputs({}, {}, 1)
        join_keys = {column.name: column for view in lookup.contract.views.values() for column in view.keys}
        keys, fields = decode.entities(message.entities, join_keys, lookup.request, lookup.optional)
        inputs = lookup.inputs(keys, fields, limits)
        if inputs.rows != 1:
            raise TooLargeError("entities", f"{inputs.rows:,} rows", expected="one row for a text")
        return inputs

    def features(self, request: Mapping[str, Values], answers: Mapping[str, ViewAnswer]) -> dict[str, str]:
        lookup = self._lookup
        if lookup is None:
            return {}
        computed = lookup.compute(request, answers) if lookup.computes else {}
        texts = {}
        for name, (source, feature, dtype) in zip(lookup.names, lookup.features, strict=True):
            values = computed[source][feature] if source in computed else answers[source].columns[feature]
            columns = json_columns(dtype, values.data[None], None if values.valid.all() else ~values.valid[None])
            ((value,),) = orjson.loads(orjson.dumps(columns, option=OPTIONS))
            texts[name] = self._missing if value is None else format_feature(value, dtype)
        return texts
