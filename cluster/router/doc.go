// Package router serves the Controller service of a whole cluster: it sends each
// call to the driver of the node that has the pool, and serves what concerns
// shared pools in its own process. Which nodes there are is told by whoever calls
// SetHosts, and which node has which pool by the nodes. The one
// node that announces a pool is recorded as its owner (Owners) when all nodes that may have
// it too have answered, and no other node gets calls for it.
//
// The nodes' drivers serve the same Controller service, over TCP with mutual TLS.
// A node is believed only what is its own: an answer about a pool that it does not
// have, or that is recorded for another node, is refused.
package router
