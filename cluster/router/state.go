package router

// State is how a node is, as the router sees it.
type State struct {
	Name string
	// Connected: a call would go out at once.
	Connected bool
	// Shared are those of its pools that another node announces too, or is recorded for.
	Shared int
}

// States are those of all nodes, by name; none as long as it is not known which there
// are.
func (s *Server) States() []State {
	all, _ := s.nodes.all()
	states := make([]State, 0, len(all))
	for _, n := range all {
		state := State{Name: n.name, Connected: n.connected()}
		for _, key := range n.view().pools {
			if len(s.nodes.announcing(key)) > 1 || s.nodes.foreign(n, key) {
				state.Shared++
			}
		}
		states = append(states, state)
	}
	return states
}
