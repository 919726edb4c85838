"""The demonstration: a year of flights written in transactions, with processes killed all the while."""
