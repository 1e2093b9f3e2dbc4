package router

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/volume"
)

// Owners records durably which node has which pool. An entry is written once. Only an
// administrator changes or removes it.
type Owners interface {
	// Known are the names of nodes by pool. The caller does not change the map.
	Known() map[string]string
	// Record adds entries for pools that have none, and returns when Known has them.
	Record(ctx context.Context, owners map[string]string) error
	// MoveCommand is what an administrator runs to give a pool to another node.
	MoveCommand(pool, node string) string
}

// maxPoolsPerNode bounds the entries of one node, so that a node cannot fill the record.
const maxPoolsPerNode = 100

// errUnrecorded means that a pool is announced by one node and has no owner yet.
var errUnrecorded = errors.New("the pool has no owner yet")

// movedError refuses a pool that is recorded for one node and announced by others.
type movedError struct {
	pool  poolKey
	owner string
	by    []*node
}

func (e *movedError) Error() string {
	return fmt.Sprintf("pool %s is recorded for node %q, and %s announces it: if its disk was moved, record the new node (`trivet doctor` in the controller's pod prints the command); if not, that node must not be trusted (docs/kubernetes.md, \"Which node has a pool\")", e.pool, e.owner, list(names(e.by)))
}

func (e *movedError) Unwrap() error { return volume.ErrPrecondition }

// holder is the node that serves a pool; nil if no node announces it. The owner of a pool
// that is announced for the first time is recorded before it serves the pool.
func (ns *nodes) holder(ctx context.Context, key poolKey) (*node, error) {
	n, err := ns.recorded(key)
	if !errors.Is(err, errUnrecorded) {
		return n, err
	}
	if err := ns.record(ctx); err != nil {
		return nil, volume.Errorf(volume.ErrUnavailable, "the owner of pool %s could not be recorded: %w", key, err)
	}
	n, err = ns.recorded(key)
	if errors.Is(err, errUnrecorded) {
		err = volume.Errorf(volume.ErrPrecondition, "pool %s: its node has %d pools on record, and gets no more: remove those that are gone from the record (docs/kubernetes.md, \"Which node has a pool\")", key, maxPoolsPerNode)
	}
	return n, err
}

// recorded is holder, and errUnrecorded where that would write.
func (ns *nodes) recorded(key poolKey) (*node, error) {
	owner, announcing := ns.owner(key), ns.announcing(key)
	i := slices.IndexFunc(announcing, func(n *node) bool { return n.name == owner })
	switch {
	case i >= 0:
		return announcing[i], nil
	case len(announcing) == 0:
		return nil, nil
	case owner != "":
		return nil, &movedError{key, owner, announcing}
	case len(announcing) > 1:
		return nil, conflict(key, announcing)
	}
	return nil, errUnrecorded
}

// owner is the name of the node that a pool is recorded for; empty: none.
func (ns *nodes) owner(key poolKey) string { return ns.owners.Known()[key.String()] }

// foreign tells whether a pool is recorded for another node.
func (ns *nodes) foreign(n *node, key poolKey) bool {
	owner := ns.owner(key)
	return owner != "" && owner != n.name
}

// serves is nil if a node is the one that serves a pool.
func (ns *nodes) serves(ctx context.Context, n *node, key poolKey) error {
	holder, err := ns.holder(ctx, key)
	switch {
	case err != nil || holder == n:
		return err
	case slices.Contains(ns.announcing(key), n):
		return &movedError{key, ns.owner(key), []*node{n}}
	}
	return volume.Errorf(volume.ErrUnavailable, "node %q does not have pool %s", n.name, key)
}

// servesNamed is nil if a node serves all of its open pools of a name.
func (ns *nodes) servesNamed(ctx context.Context, n *node, pool string) error {
	for _, key := range n.viewFor(ctx, pool).named(pool) {
		if key.uuid == "" {
			continue
		}
		if err := ns.serves(ctx, n, key); err != nil {
			return err
		}
	}
	return nil
}

// record records all pools that have no owner. Callers that wait for each other are
// served by one write.
func (ns *nodes) record(ctx context.Context) error {
	select {
	case ns.recording <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-ns.recording }()
	missing := ns.unrecorded()
	if len(missing) == 0 {
		return nil
	}
	return ns.owners.Record(ctx, missing)
}

// recordSoon is record for nobody who waits. It is called again.
func (ns *nodes) recordSoon(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	if err := ns.record(limited); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).V(2).Info("The owners of new pools could not be recorded; it is tried again", "reason", err.Error())
	}
}

// unrecorded are the nodes of pools without an owner, as many as the nodes may have.
func (ns *nodes) unrecorded() map[string]string {
	known := ns.owners.Known()
	count := map[string]int{}
	for _, name := range known {
		count[name]++
	}
	ns.mu.RLock()
	defer ns.mu.RUnlock()
	missing := map[string]string{}
	for key, announcing := range ns.announced {
		name := announcing[0].name
		if len(announcing) == 1 && known[key.String()] == "" && count[name] < maxPoolsPerNode {
			missing[key.String()] = name
			count[name]++
		}
	}
	return missing
}

// FileOwners are Owners in a file, for a controller outside Kubernetes.
type FileOwners struct {
	root *os.Root
	mu   sync.Mutex
	// known is replaced, never changed.
	known map[string]string
}

// ownersFile is the name of the file.
const ownersFile = "pool-owners.json"

// OpenOwners reads the owners from a file in a directory.
func OpenOwners(root *os.Root) (*FileOwners, error) {
	o := &FileOwners{root: root, known: map[string]string{}}
	b, err := root.ReadFile(ownersFile)
	if errors.Is(err, fs.ErrNotExist) {
		return o, nil
	}
	if err := cmp.Or(err, json.Unmarshal(b, &o.known)); err != nil {
		return nil, fmt.Errorf("%s: %w: restore the file; without it the first node to announce a pool owns it", o.path(), err)
	}
	return o, nil
}

func (o *FileOwners) path() string { return filepath.Join(o.root.Name(), ownersFile) }

// Known implements Owners.
func (o *FileOwners) Known() map[string]string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.known
}

// Record implements Owners.
func (o *FileOwners) Record(_ context.Context, owners map[string]string) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	all := maps.Clone(owners)
	maps.Copy(all, o.known)
	b, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		return err
	}
	if err := atomicfile.Write(o.root, ownersFile, b); err != nil {
		return fmt.Errorf("%s: %w", o.path(), err)
	}
	o.known = all
	return nil
}

// MoveCommand implements Owners.
func (o *FileOwners) MoveCommand(pool, node string) string {
	return fmt.Sprintf("stop the controller's driver, set %q to %q in %s, and start it", pool, node, o.path())
}
