"""Preference files -> packs: tables -> examples -> tokens -> packing; summary/ says what is in the data."""
