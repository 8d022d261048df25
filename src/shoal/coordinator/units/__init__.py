"""Work units and scheduled tasks: cut from the data, leased, renewed and re-issued."""
