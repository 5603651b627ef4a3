"""Learning while serving: served texts go to disk, newer drafters come from it."""
