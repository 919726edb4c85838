"""What every request passes at its entry: permissions, quotas, limits of connections, TLS.

It may import nothing else of the service.
"""
