"""Tables of runs: a description becomes cells, cells become runs, runs become a ledger."""
