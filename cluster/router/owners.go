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

// Owners durably records the owner of each pool, which is the only node that may serve the pool. The
// router writes an entry once. Only an administrator changes or removes an entry.
type Owners interface {
	// Known returns the names of the owners by pool. The caller must not change the map.
	Known() map[string]string
	// Record adds entries for pools that have none. After it returns nil, Known returns them.
	Record(ctx context.Context, owners map[string]string) error
	// MoveCommand returns the command or the instruction with which an administrator records another node.
	MoveCommand(pool, node string) string
}

// maxPoolsPerNode bounds the entries of one node, so that a node cannot fill the record.
const maxPoolsPerNode = 100

// errUnrecorded means that a pool has no owner, and that the only node that announces it can be recorded.
var errUnrecorded = errors.New("the pool has no owner yet")

// ownerError is the error for a pool that no node serves until an administrator records an owner,
// or until another node no longer announces the pool.
type ownerError struct {
	error
	candidate string // the node that an administrator may record
	condition string // the condition under which the administrator may do this
}

func (e *ownerError) Unwrap() error { return e.error }

// moved returns the error for a pool that is recorded for one node and announced by others.
func moved(key poolKey, owner string, announcing ...*node) error {
	return newOwnerError(announcing, "the disk was moved",
		"pool %s is recorded for node %q, and %s announces it: if the pool's disk was moved to %[3]s, record the new node (`trivet doctor` in the controller's pod prints the command); if not, do not trust %[3]s (docs/operations/nodes.md, \"Which node has a pool\")",
		key, owner, quoted(names(announcing)))
}

// conflict returns the error for a pool without an owner that several nodes announce.
func conflict(key poolKey, announcing []*node) error {
	remedy := "one of their disks is a copy: remove the copy, or empty its directory, and restart the driver on its node"
	if silent, _ := unavailable(announcing, key.name); len(silent) > 0 {
		remedy = fmt.Sprintf("%s does not answer: if the pool's disk was moved from %[1]s to the other node, delete the Node object %[1]s; if one of the disks is a copy, remove the copy, or empty its directory, and restart the driver on its node", quoted(names(silent)))
	}
	return newOwnerError(announcing, `"NODE" has the original disk`,
		"pool %s is on nodes %s: %s; or record the node that has the original (`trivet doctor` in the controller's pod prints the command)",
		key, quoted(names(announcing)), remedy)
}

// newOwnerError returns an ownerError of kind ErrPrecondition. The candidate is the announcing node if there is only
// one.
func newOwnerError(announcing []*node, condition, format string, args ...any) error {
	candidate := "NODE" // a placeholder
	if len(announcing) == 1 {
		candidate = announcing[0].name
	}
	return &ownerError{volume.Errorf(volume.ErrPrecondition, format, args...), candidate, condition}
}

// serving returns the node that serves a pool, or nil if no node announces the pool. If the pool has no
// owner yet, serving records the owner.
func (ns *nodes) serving(ctx context.Context, key poolKey) (*node, error) {
	n, err := ns.servingRecorded(key)
	if !errors.Is(err, errUnrecorded) {
		return n, err
	}
	if err := ns.record(ctx); err != nil {
		return nil, volume.Errorf(volume.ErrUnavailable, "the owner of pool %s could not be recorded: %w", key, err)
	}
	n, err = ns.servingRecorded(key)
	if errors.Is(err, errUnrecorded) {
		err = volume.Errorf(volume.ErrPrecondition, "pool %s: its node has %d pools on record, which is the maximum: remove those that no longer exist from the record (docs/operations/nodes.md, \"Which node has a pool\")", key, maxPoolsPerNode)
	}
	return n, err
}

// servingRecorded is like serving, but records nothing. It returns errUnrecorded if the pool's owner must
// be recorded first.
func (ns *nodes) servingRecorded(key poolKey) (*node, error) {
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
	if silent, expecting := ns.possibleOwners(key); len(silent)+len(expecting) > 0 {
		return nil, ns.notRecordedYet(key, announcing[0], silent, expecting)
	}
	return nil, errUnrecorded
}

// possibleOwners returns the nodes that may have a pool although they do not announce it: those that have not
// answered since the controller started (silent), and those that had the pool before and have it closed now
// (expecting). While such a node exists, the pool is not recorded, because the node that announces the pool
// may have a copy.
func (ns *nodes) possibleOwners(key poolKey) (silent, expecting []*node) {
	ns.mu.RLock()
	unanswered, expecting := ns.unanswered(), ns.announced.expected[key]
	ns.mu.RUnlock()
	return ns.withoutOwners(unanswered, key.name), expecting
}

// withoutOwners returns the nodes that do not own a pool with a name yet.
func (ns *nodes) withoutOwners(unanswered []*node, pool string) []*node {
	if len(unanswered) == 0 {
		return nil
	}
	owners := map[string]bool{}
	for key, name := range ns.owners.Known() { // key is POOL.UUID
		if key[:max(0, strings.LastIndexByte(key, '.'))] == pool {
			owners[name] = true
		}
	}
	return slices.DeleteFunc(slices.Clone(unanswered), func(n *node) bool { return owners[n.name] })
}

// notRecordedYet returns the error for a pool that is not recorded yet because of its possible owners.
func (ns *nodes) notRecordedYet(key poolKey, announcing *node, silent, expecting []*node) error {
	record := ns.owners.MoveCommand(key.String(), announcing.name)
	if len(silent) == 0 {
		return volume.Errorf(volume.ErrUnavailable, "pool %s is not recorded yet for node %q, which announces it, and is closed on %s, which had it before. Check the driver's log there; or, only if the pool's disk was moved from there to node %[2]q, record it: %[4]s (docs/operations/nodes.md, \"Which node has a pool\")",
			key, announcing.name, quoted(names(expecting)), record)
	}
	reason := "its pools were not requested yet"
	if err := silent[0].view().lastError; err != nil {
		reason = status.Convert(err).Message()
	}
	others := ""
	if len(silent) > 1 {
		others = fmt.Sprintf(" (nor have %d other nodes)", len(silent)-1)
	}
	return volume.Errorf(volume.ErrUnavailable, "pool %s is not recorded yet for node %q, which announces it, and node %q has not answered%s: %s. Restore that node, or delete its Node object if it no longer exists; or, only if no other node has the pool, record it: %s (docs/operations/nodes.md, \"Which node has a pool\")",
		key, announcing.name, silent[0].name, others, reason, record)
}

// owner returns the name of the node that owns a pool, or "" if no owner is recorded.
func (ns *nodes) owner(key poolKey) string { return ns.owners.Known()[key.String()] }

// ownedByOther reports whether a node other than n owns a pool.
func (ns *nodes) ownedByOther(n *node, key poolKey) bool {
	owner := ns.owner(key)
	return owner != "" && owner != n.name
}

// checkServes fails unless n serves the pool.
func (ns *nodes) checkServes(ctx context.Context, n *node, key poolKey) error {
	serving, err := ns.serving(ctx, key)
	switch {
	case err != nil || serving == n:
		return err
	case slices.Contains(ns.announcing(key), n):
		return moved(key, ns.owner(key), n)
	}
	return volume.Errorf(volume.ErrUnavailable, "node %q does not have pool %s", n.name, key)
}

// checkServesNamed fails unless n serves all of its open pools with a name.
func (ns *nodes) checkServesNamed(ctx context.Context, n *node, pool string) error {
	for _, key := range n.viewFor(ctx, pool).named(pool) {
		if key.uuid == "" {
			continue
		}
		if err := ns.checkServes(ctx, n, key); err != nil {
			return err
		}
	}
	return nil
}

// record records the owner of each pool that has no owner and whose owner is certain. Concurrent calls
// wait for each other, and the first one records the pools of all of them.
func (ns *nodes) record(ctx context.Context) error {
	select {
	case ns.recording <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-ns.recording }()
	state := ns.recordState()
	missing := ns.unrecorded()
	if len(missing) > 0 {
		if err := ns.owners.Record(ctx, missing); err != nil {
			return err
		}
	}
	ns.mu.Lock()
	defer ns.mu.Unlock()
	ns.recorded = state
	return nil
}

// recordState is the state from which record decides.
type recordState struct {
	changes uint64 // of announcements
	owners  int    // the number of pools with an owner
}

func (ns *nodes) recordState() recordState {
	ns.mu.RLock()
	defer ns.mu.RUnlock()
	return recordState{ns.announced.changes, len(ns.owners.Known())}
}

// recordNew calls record, unless nothing has changed since the last successful call. It only logs an error, because the next
// call tries again.
func (ns *nodes) recordNew(ctx context.Context) {
	state := ns.recordState()
	ns.mu.RLock()
	unchanged := ns.recorded == state
	ns.mu.RUnlock()
	if unchanged {
		return
	}
	limited, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	if err := ns.record(limited); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).V(2).Info("The owners of new pools could not be recorded; retrying", "reason", err.Error())
	}
}

// unrecorded returns the owners to record, by pool. The owner of a pool is the only node that announces it.
// unrecorded omits pools that have other possible owners, and pools that exceed maxPoolsPerNode.
func (ns *nodes) unrecorded() map[string]string {
	known := ns.owners.Known()
	count := map[string]int{}
	for _, name := range known {
		count[name]++
	}
	ns.mu.RLock()
	defer ns.mu.RUnlock()
	unanswered := ns.unanswered()
	uncertain := map[string]bool{} // by pool name: an unanswered node may have the pool
	missing := map[string]string{}
	for key, announcing := range ns.announced.open {
		if len(announcing) > 1 || len(ns.announced.expected[key]) > 0 || known[key.String()] != "" {
			continue
		}
		if _, checked := uncertain[key.name]; !checked {
			uncertain[key.name] = len(ns.withoutOwners(unanswered, key.name)) > 0
		}
		if name := announcing[0].name; !uncertain[key.name] && count[name] < maxPoolsPerNode {
			missing[key.String()] = name
			count[name]++
		}
	}
	return missing
}

// FileOwners implements Owners with a file, for a controller outside Kubernetes.
type FileOwners struct {
	root  *os.Root
	mu    sync.Mutex
	known map[string]string // replaced, never changed
}

const ownersFile = "pool-owners.json"

// OpenOwners reads the owners from pool-owners.json in a directory. Without the file, no pool has an owner.
func OpenOwners(root *os.Root) (*FileOwners, error) {
	o := &FileOwners{root: root, known: map[string]string{}}
	b, err := root.ReadFile(ownersFile)
	if errors.Is(err, fs.ErrNotExist) {
		return o, nil
	}
	if err := cmp.Or(err, json.Unmarshal(b, &o.known)); err != nil {
		return nil, fmt.Errorf("%s: %w: restore the file; without it the owners of all pools are recorded again", o.path(), err)
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
