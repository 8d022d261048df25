"""The state that survives a crash: journal, snapshots, ledger, and the state replayed from them."""
