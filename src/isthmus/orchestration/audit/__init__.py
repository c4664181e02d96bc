"""`isthmus audit` and `isthmus init --from-feast`: audit an existing Feast repository, or convert it."""
