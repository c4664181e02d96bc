"""`isthmus audit` and `isthmus init --from-feast`: an existing Feast repository, examined and converted."""
