"""`isthmus audit REPO` and `isthmus init --from-feast REPO`: audit an existing Feast repository, or convert it."""
