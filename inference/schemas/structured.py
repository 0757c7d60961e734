"""Fields that give the answer a form: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

_Regex: TypeAlias = Annotated[str, Meta(min_length=1, max_length=16_384)]
_Grammar: TypeAlias = Annotated[str, Meta(min_length=1, max_length=131_072)]
_Choice: TypeAlias = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=1024)]


class TextFormat(msgspec.Struct, tag="text", forbid_unknown_fields=True):
    pass


class JsonObjectFormat(msgspec.Struct, tag="json_object", forbid_unknown_fields=True):
    pass


class JsonSchema(msgspec.Struct, rename={"definition": "schema"}, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    definition: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    """The schema is always followed exactly."""


class JsonSchemaFormat(msgspec.Struct, tag="json_schema", forbid_unknown_fields=True):
    json_schema: JsonSchema


ResponseFormat: TypeAlias = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """At most one of them."""

    json: dict[str, Any] | None = None
    json_object: Literal[True] | None = None
    regex: _Regex | None = None
    choice: _Choice | None = None
    grammar: _Grammar | None = None


class StructuredFields(msgspec.Struct, kw_only=True):
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | None = None
    guided_regex: _Regex | None = None
    guided_choice: _Choice | None = None
    guided_grammar: _Grammar | None = None

    def forms(self) -> dict[str, tuple[str, Any]]:
        """What was asked for: by the field's name, its kind and value."""
        asked: dict[str, tuple[str, Any]] = {}
        for kind in ("json", "regex", "choice", "grammar"):
            asked[f"guided_{kind}"] = (kind, getattr(self, f"guided_{kind}"))
        for kind in ("json", "json_object", "regex", "choice", "grammar") if self.structured_outputs else ():
            asked[f"structured_outputs.{kind}"] = (kind, getattr(self.structured_outputs, kind))
        return {name: form for name, form in asked.items() if form[1] is not None}
