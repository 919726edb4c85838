"""The asyncio client, the sync client and the readers that applications use"""
