package router

import (
	"maps"
	"slices"
	"testing"
)

// TestAnnouncements: each change of a node changes only what that node announced, and slices that were read before stay
// unchanged.
func TestAnnouncements(t *testing.T) {
	a, b := &node{name: "a"}, &node{name: "b"}
	one, two, closed := poolKey{"default", "one"}, poolKey{"default", "two"}, poolKey{"default", ""}
	kinds := map[string]string{"default": "directory"}
	announced := newAnnouncements()
	for _, step := range []struct {
		name     string
		node     *node
		now      view
		changed  []poolKey
		open     map[poolKey]string // the names of the nodes
		expected map[poolKey]string
		answered int
		usable   map[usablePool]int
	}{
		{"a answers", a, view{answered: true, pools: []poolKey{one}, kinds: kinds}, []poolKey{one}, map[poolKey]string{one: "a"}, nil, 1, map[usablePool]int{{"default", "directory", true}: 1}},
		{"b has the same pool, and an earlier version", b, view{answered: true, pools: []poolKey{one}}, []poolKey{one}, map[poolKey]string{one: "ab"}, nil, 2, map[usablePool]int{{"default", "directory", true}: 1, {"default", "", false}: 1}},
		{"b has another pool", b, view{answered: true, pools: []poolKey{two}, kinds: kinds}, []poolKey{one, two}, map[poolKey]string{one: "a", two: "b"}, nil, 2, map[usablePool]int{{"default", "directory", true}: 2}},
		{"the pool of a is closed", a, view{answered: true, pools: []poolKey{closed}, expected: []poolKey{one}, kinds: kinds}, []poolKey{one}, map[poolKey]string{two: "b"}, map[poolKey]string{one: "a"}, 2, map[usablePool]int{{"default", "directory", true}: 2}},
		{"a is removed", a, view{}, nil, map[poolKey]string{two: "b"}, nil, 1, map[usablePool]int{{"default", "directory", true}: 1}},
	} {
		read := maps.Clone(announced.open)
		before := nodeNames(announced.open)
		changed := announced.replace(step.node, step.now)
		if !slices.Equal(changed, step.changed) {
			t.Errorf("%s: got the changed pools %v, want %v", step.name, changed, step.changed)
		}
		if got := nodeNames(announced.open); !maps.Equal(got, step.open) {
			t.Errorf("%s: got the open pools %v, want %v", step.name, got, step.open)
		}
		if got := nodeNames(announced.expected); !maps.Equal(got, step.expected) {
			t.Errorf("%s: got the expected pools %v, want %v", step.name, got, step.expected)
		}
		if announced.answered != step.answered || !maps.Equal(announced.usable, step.usable) {
			t.Errorf("%s: got %d nodes that have answered and %v, want %d and %v", step.name, announced.answered, announced.usable, step.answered, step.usable)
		}
		if got := nodeNames(read); !maps.Equal(got, before) {
			t.Errorf("%s: slices that were read before changed from %v to %v", step.name, before, got)
		}
	}
}

// nodeNames returns the joined names of the nodes of each pool.
func nodeNames(pools poolNodes) map[poolKey]string {
	joined := map[poolKey]string{}
	for key, nodes := range pools {
		for _, name := range names(nodes) {
			joined[key] += name
		}
	}
	return joined
}
