// Package router serves the CSI Controller services of a cluster. It sends each call for a
// node-local pool to the driver of the pool's node, and each call for a shared pool to a service in
// this process. SetHosts sets the nodes; the nodes' drivers announce their pools.
//
// If exactly one node announces a pool, the router records that node as the pool's owner (Owners), after
// every other node that may have the pool has answered. Other nodes get no calls for the pool.
//
// The nodes' drivers serve the same Controller services over TCP with mutual TLS. They are not
// trusted: a response about a pool that the node does not have, or that is recorded for another
// node, is rejected.
package router
