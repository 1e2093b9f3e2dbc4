// Package router serves the Controller service of a whole cluster: it sends each
// call to the driver of the node that has the pool, and serves what concerns
// shared pools in its own process. It keeps nothing: which node has which pool is
// asked of the nodes, which nodes there are is told by whoever calls SetHosts.
//
// The nodes' drivers serve the same Controller service, over TCP with mutual TLS.
// A node is believed only what is its own: an answer about a pool that it does not
// have, or that another node says to have too, is refused.
package router
