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
	"strings"
	"sync"

	"google.golang.org/grpc/status"
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

// errUnrecorded means that a pool has no owner yet, and the one node that announces it may
// be recorded.
var errUnrecorded = errors.New("the pool has no owner yet")

// ownerError refuses a pool that no node serves until an administrator has recorded an owner,
// or until another node announces the pool no longer.
type ownerError struct {
	error
	pool poolKey
	by   []*node // those that announce it
	// condition is when the owner may be recorded by hand.
	condition string
}

func (e *ownerError) Unwrap() error { return e.error }

// candidate is the node that would be recorded; a placeholder if there are several.
func (e *ownerError) candidate() string {
	if len(e.by) > 1 {
		return "NODE"
	}
	return e.by[0].name
}

// moved refuses a pool that is recorded for one node and announced by others.
func moved(key poolKey, owner string, by ...*node) error {
	return &ownerError{
		volume.Errorf(volume.ErrPrecondition, "pool %s is recorded for node %q, and %s announces it: if its disk was moved, record the new node (`trivet doctor` in the controller's pod prints the command); if not, that node must not be trusted (docs/kubernetes.md, \"Which node has a pool\")", key, owner, list(names(by))),
		key, by, "the disk was moved",
	}
}

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

// recorded is the node that serves a pool according to the record; nil if no node announces
// the pool. It writes nothing: errUnrecorded tells the caller to record the pool.
func (ns *nodes) recorded(key poolKey) (*node, error) {
	owner, announcing := ns.owner(key), ns.announcing(key)
	i := slices.IndexFunc(announcing, func(n *node) bool { return n.name == owner })
	switch {
	case i >= 0:
		return announcing[i], nil
	case len(announcing) == 0:
		return nil, nil
	case owner != "":
		return nil, moved(key, owner, announcing...)
	case len(announcing) > 1:
		return nil, conflict(key, announcing)
	}
	if silent := ns.suspects(ns.unheard(), key.name); len(silent) > 0 {
		return nil, ns.early(key, announcing[0], silent)
	}
	return nil, errUnrecorded
}

// unheard are the nodes that have not answered since the controller started.
func (ns *nodes) unheard() []*node {
	ns.mu.RLock()
	defer ns.mu.RUnlock()
	return slices.DeleteFunc(slices.Clone(ns.sorted), func(n *node) bool { return ns.heard[n] })
}

// suspects are those of unheard nodes that may have a pool of a name: no pool of that name is
// on record for them. While there are any, no such pool is recorded, because the node that
// announces it may have a copy.
func (ns *nodes) suspects(unheard []*node, pool string) []*node {
	if len(unheard) == 0 {
		return nil
	}
	onRecord := map[string]bool{}
	for key, name := range ns.owners.Known() {
		if key[:max(0, strings.LastIndexByte(key, '.'))] == pool {
			onRecord[name] = true
		}
	}
	return slices.DeleteFunc(slices.Clone(unheard), func(n *node) bool { return onRecord[n.name] })
}

// early refuses a pool that is not recorded yet because of nodes that have not answered.
func (ns *nodes) early(key poolKey, announcing *node, silent []*node) error {
	reason := "it was not asked yet"
	if trouble := silent[0].view().trouble; trouble != nil {
		reason = status.Convert(trouble).Message()
	}
	others := ""
	if len(silent) > 1 {
		others = fmt.Sprintf(" (nor have %d other nodes)", len(silent)-1)
	}
	return volume.Errorf(volume.ErrUnavailable, "pool %s is not recorded yet for node %q, which announces it, and node %q has not answered%s: %s. Bring that node back, or delete its Node object if it is gone; or, only if no other node has the pool, record it: %s (docs/kubernetes.md, \"Which node has a pool\")",
		key, announcing.name, silent[0].name, others, reason, ns.owners.MoveCommand(key.String(), announcing.name))
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
		return moved(key, ns.owner(key), n)
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

// recordSoon records new pools in the background, after each answer of a node. An error is
// logged only, since the next answer tries again.
func (ns *nodes) recordSoon(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	if err := ns.record(limited); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).V(2).Info("The owners of new pools could not be recorded; it is tried again", "reason", err.Error())
	}
}

// unrecorded are the nodes to record, by pool: of each pool without an owner that one node
// announces, once all nodes that may have it too have answered. A node gets no more than
// maxPoolsPerNode.
func (ns *nodes) unrecorded() map[string]string {
	known := ns.owners.Known()
	count := map[string]int{}
	for _, name := range known {
		count[name]++
	}
	unheard := ns.unheard() // first: what those that were heard announce must be in announced
	ns.mu.RLock()
	announced := ns.announced
	ns.mu.RUnlock()
	early := map[string]bool{} // by the pool's name
	missing := map[string]string{}
	for key, announcing := range announced {
		if len(announcing) > 1 || known[key.String()] != "" {
			continue
		}
		if _, asked := early[key.name]; !asked {
			early[key.name] = len(ns.suspects(unheard, key.name)) > 0
		}
		if name := announcing[0].name; !early[key.name] && count[name] < maxPoolsPerNode {
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
		return nil, fmt.Errorf("%s: %w: restore the file; without it the owners of all pools are recorded anew", o.path(), err)
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
