"""The protocols between clients and services: session and stream frames, service discovery, and log identity"""
