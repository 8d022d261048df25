"""XML-RPC over HTTP, for debugging: the same results, slower, and readable with any network tool.

One method, `shoal.call(header, frames)`, all of it base64. The join token travels in the Authorization header and is checked before a body
is read. Nothing is encrypted, so a server does not leave this machine unless told that this is meant.
"""

from shoal.transports.xmlrpc.client import XmlRpcClient
from shoal.transports.xmlrpc.server import XmlRpcServer

__all__ = ["XmlRpcClient", "XmlRpcServer"]
