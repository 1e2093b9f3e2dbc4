package router

import (
	"context"

	"google.golang.org/grpc"
)

// State describes the router's connection to a node.
type State struct {
	Name string
	// Connected is true if a call would be sent immediately.
	Connected bool
	// Conflicts is the number of the node's pools that another node also announces, or that are recorded
	// for another node.
	Conflicts int
}

// States returns the states of all nodes, sorted by name. It returns none before SetHosts was called.
func (s *Server) States() []State {
	all, _ := s.nodes.all()
	states := make([]State, 0, len(all))
	for _, n := range all {
		state := State{Name: n.name, Connected: n.connected()}
		for _, key := range n.view().pools {
			if len(s.nodes.announcing(key)) > 1 || s.nodes.ownedByOther(n, key) {
				state.Conflicts++
			}
		}
		states = append(states, state)
	}
	return states
}

// EachNode calls f for all nodes, up to fanOut at a time, with a connection to the node's driver. The errors of
// calls over the connection name the node.
func (s *Server) EachNode(ctx context.Context, f func(ctx context.Context, node string, conn grpc.ClientConnInterface)) {
	all, _ := s.nodes.all()
	_ = each(ctx, all, func(ctx context.Context, n *node) error {
		f(ctx, n.name, explainedConn{n})
		return nil
	})
}

// Serves reports whether a node-local pool is recorded for a node and announced by it.
func (s *Server) Serves(node, pool, uuid string) bool {
	n, _ := s.nodes.servingRecorded(poolKey{pool, uuid})
	return n != nil && n.name == node
}

// Owns reports whether a node is recorded as the owner of a node-local pool, also while the pool is not open.
func (s *Server) Owns(node, pool, uuid string) bool {
	return s.nodes.owner(poolKey{pool, uuid}) == node
}

// explainedConn is a connection to a node whose errors name the node.
type explainedConn struct{ *node }

// Invoke implements grpc.ClientConnInterface.
func (c explainedConn) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	if err := c.node.Invoke(ctx, method, args, reply, opts...); err != nil {
		return c.explain(ctx, err)
	}
	return nil
}
