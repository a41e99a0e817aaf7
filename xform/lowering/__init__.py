"""How a primitive becomes code: the same meaning for every device."""
