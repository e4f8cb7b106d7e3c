"""Extension of griffe, which reads the reference: defaults of options as a reader expects them."""

from typing import Any

import griffe


class OptionDefaults(griffe.Extension):
    """Shows the default of a field that `option_field` declares, in place of that call."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Replaces the value of such a field."""
        call = attr.value
        if isinstance(call, griffe.ExprCall) and str(call.function) == "option_field":
            attr.value = call.arguments[0]
