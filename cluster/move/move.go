package move

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/kubectl"
	"github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/internal/crashpoint"
)

// Options are the arguments of a move.
type Options struct {
	Namespace, ClaimName string
	// To is the node to which the volume is moved.
	To string
	// SnapshotClass is the class of the snapshots. If it is empty, the only one or the default one of the driver is used.
	SnapshotClass string
	// Recover is true for the recovery of a claim whose node is lost.
	Recover bool
	// Keep keeps the old volume after the move.
	Keep bool
	// StayCordoned keeps the node from which the volume is moved cordoned.
	StayCordoned bool
	// Timeout limits each wait for pods and objects. The transfer of data has no limit.
	Timeout time.Duration
	// Transfers reports whether volumes of a kind can be sent to another node.
	Transfers func(kind string) bool
	// Progress prints a line.
	Progress func(format string, args ...any)
}

// Mover moves the volume of a claim.
type Mover struct {
	Options
	api *kubectl.Cluster
	// nodeReport returns the report of the driver on a node, which is collected after the call.
	nodeReport func(ctx context.Context, node string) (status.Report, error)
	// claim, record and state are as this process has last read or written them. record is the ConfigMap of the state.
	claim  kube.Claim
	record kube.Meta
	state  state
	times  times
	// unused is the time of the last successful check that no pod uses the volume. It includes the time in which the machine is
	// suspended.
	unused time.Time
}

// New reads a claim and the state of its move, if one has begun.
func New(ctx context.Context, cluster *kubectl.Cluster, o Options) (*Mover, error) {
	claim, err := cluster.Claim(ctx, o.Namespace, o.ClaimName)
	if err != nil {
		return nil, err
	}
	m := &Mover{Options: o, api: cluster, nodeReport: cluster.NodeReport, claim: claim}
	record, err := cluster.ConfigMap(ctx, cluster.Namespace, recordName(claim.Metadata.UID))
	if apierrors.IsNotFound(err) {
		return m, nil
	}
	if err == nil {
		m.record = record.Metadata
		m.state, err = readState(record)
	}
	return m, err
}

// Begun describes the move that has begun and is not complete, or returns "".
func (m *Mover) Begun() string {
	if m.state.Step == complete {
		return ""
	}
	return fmt.Sprintf("%s %s from node %s to node %s, step %s", m.kind(), m.state.ID, m.state.From, m.state.To, m.state.Step)
}

// kind returns what the state is the state of.
func (m *Mover) kind() string {
	if m.state.Recovery != nil {
		return "recovery"
	}
	return "move"
}

// checkCommand returns an error if the state is that of a recovery and the command is a move, or the other way round.
func (m *Mover) checkCommand() error {
	if m.Recover == (m.state.Recovery != nil) {
		return nil
	}
	command := "move"
	if m.state.Recovery != nil {
		command = "recover"
	}
	return fmt.Errorf("claim %s/%s has a %s that is not complete: complete or undo it with 'kubectl trivet %s -n %[1]s %[2]s'", m.Namespace, m.ClaimName, m.kind(), command)
}

// Destination returns the node of the move that has begun.
func (m *Mover) Destination() string { return m.state.To }

// Next reports whether Resume can continue the move that has begun, and whether Abort can undo it.
func (m *Mover) Next() (resume, abort bool) {
	return m.state.Step != aborting, m.state.Step != starting && m.state.Step != cleaning
}

// Start moves the volume as planned.
func (m *Mover) Start(ctx context.Context, p Plan) error {
	first, round := stopping, 0
	if len(p.Pods) > 0 && !p.Single {
		first, round = copying, 1
	}
	err := m.save(ctx, func(s *state) {
		*s = state{
			ID: uuid.NewString()[:8], Namespace: m.Namespace, Claim: m.ClaimName, UID: m.claim.Metadata.UID, From: p.From, To: p.To, SnapshotClass: p.SnapshotClass, Step: first, Round: round,
			Single: p.Single, Locked: p.Locked, Used: len(p.Pods) > 0, Keep: m.Keep, Old: manifestOf(p.old),
		}
		m.hold(s)
	})
	if err != nil {
		return err
	}
	crashpoint.Here(crashpoint.MoveBegun)
	return m.run(ctx)
}

// Resume continues a move that has begun.
func (m *Mover) Resume(ctx context.Context) error {
	switch err := m.checkCommand(); {
	case err != nil:
		return err
	case !m.Recover && m.To != m.state.To:
		return fmt.Errorf("--to %q: the claim is already being moved to node %s: continue with --to %[2]s, or undo that move with --abort", m.To, m.state.To)
	case m.state.Step == aborting:
		return fmt.Errorf("claim %s/%s: its %s is being undone: complete this with --abort", m.Namespace, m.ClaimName, m.kind())
	}
	m.Progress("Continuing %s %s at the step %s.", m.kind(), m.state.ID, m.state.Step)
	if err := m.save(ctx, m.hold); err != nil {
		return err
	}
	if err := m.rewind(ctx); err != nil {
		return err
	}
	return m.run(ctx)
}

// rewind returns to an earlier step if the volume may have been used since the last copy was created.
func (m *Mover) rewind(ctx context.Context) error {
	current, err := m.current(ctx)
	if err != nil {
		return err
	}
	m.unused = now() // if the claim has no volume, no pod can start
	switch {
	case m.state.Step == catching:
		return m.copyAgain(ctx)
	case m.state.Step == swapping && current == oldVolume && m.state.Recovery == nil:
		return m.enter(ctx, stopping)
	}
	return nil
}

// run runs the steps from that of the state on.
func (m *Mover) run(ctx context.Context) error {
	steps := map[step]func(context.Context) error{
		copying: m.precopy, stopping: m.stop, catching: m.catchUp, swapping: m.swap, starting: m.start, cleaning: m.clean,
	}
	for m.state.Step != complete {
		if err := steps[m.state.Step](ctx); err != nil {
			return err
		}
	}
	return nil
}

// minPoll and maxPoll are the shortest and the longest time between two reads of an object that is waited for. Between them, it is a
// tenth of the time that has passed.
const minPoll, maxPoll = 20 * time.Millisecond, 200 * time.Millisecond

// until is the function until with the output of the move.
func (m *Mover) until(ctx context.Context, limit time.Duration, what string, done func() (bool, error)) error {
	return until(ctx, m.Progress, limit, what, done)
}

// until calls done until it returns true or an error. It continues after errors of an API server that does not answer. A limit of 0
// means none. The error after the limit contains what, such as "claim c is Bound".
func until(ctx context.Context, progress func(format string, args ...any), limit time.Duration, what string, done func() (bool, error)) error {
	begin, silent := time.Now(), false
	for {
		ok, err := done()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if ok || err != nil && !kube.Unanswered(err) {
			return err
		}
		if limit > 0 && time.Since(begin) > limit {
			return errors.Join(fmt.Errorf("timed out after %v waiting until %s", limit, what), err)
		}
		if err != nil && !silent {
			progress("The API server does not answer; retrying: %v", err)
		}
		silent = err != nil
		select {
		case <-ctx.Done():
		case <-time.After(min(max(time.Since(begin)/10, minPoll), maxPoll)):
		}
	}
}

// now returns the time without the monotonic clock, which stops while the machine is suspended.
func now() time.Time { return time.Now().Round(0) }

// times are the parts of the time in which the pods are stopped.
type times struct{ stopped, ended, snapshot, copied, swapped time.Time }

// String returns the parts, or "" if this process has not run all of them.
func (t times) String() string {
	if t.stopped.IsZero() || t.swapped.IsZero() {
		return ""
	}
	now := time.Now()
	seconds := func(from, to time.Time) float64 { return to.Sub(from).Seconds() }
	return fmt.Sprintf("%.1f s: end of the pods %.1f s, snapshot %.1f s, transfer %.1f s, replacement of the volume %.1f s, start of the pods %.1f s",
		seconds(t.stopped, now), seconds(t.stopped, t.ended), seconds(t.ended, t.snapshot), seconds(t.snapshot, t.copied), seconds(t.copied, t.swapped), seconds(t.swapped, now))
}
