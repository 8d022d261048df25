"""One served model whose layers are on several machines."""
