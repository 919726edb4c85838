"""The demo: a year of flights written in transactions while processes are killed"""
