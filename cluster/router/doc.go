// Package router serves the CSI Controller services of a cluster. It sends each call for a
// node-local pool to the driver of the pool's node, and each call for a shared pool to a service in
// this process. SetHosts gives it the nodes; the nodes' drivers announce their pools.
//
// A pool that one node announces is recorded for this node (Owners) after every node that may
// have the pool too has answered. Other nodes get no calls for it.
//
// The nodes' drivers serve the same Controller services over TCP with mutual TLS. They are not
// trusted: a response about a pool that the node does not have, or that is recorded for another
// node, is rejected.
package router
