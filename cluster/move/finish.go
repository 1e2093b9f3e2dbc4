package move

import (
	"context"
	"fmt"
	"time"

	"github.com/trivet-csi/trivet/internal/crashpoint"
)

// clean deletes the old volume and the objects that exist only during the move.
func (m *Mover) clean(ctx context.Context) error {
	current, err := m.current(ctx)
	if err != nil {
		return err
	}
	if current != newVolume {
		return fmt.Errorf("claim %s/%s does not have the volume on node %s: nothing is deleted", m.Namespace, m.ClaimName, m.state.To)
	}
	if err := m.verify(ctx); err != nil {
		return err
	}
	if err := m.removeCopies(ctx, m.state.Round); err != nil {
		return err
	}
	if m.state.Keep || m.Keep {
		m.Progress("PersistentVolume %s keeps the old volume. This command deletes it and its data:", m.keptName())
		m.Progress(`  kubectl patch persistentvolume %s -p '{"spec":{"persistentVolumeReclaimPolicy":"Delete"}}'`, m.keptName())
	} else if err := m.removeKept(ctx, true); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.MoveOldGone)
	other := map[string]any{}
	if m.claim.Metadata.Annotations[selectedNode] != "" {
		other[selectedNode] = m.state.To
	}
	if r := m.state.Recovery; r != nil {
		other[recoveredAnnotation] = r.Snapshotted.UTC().Format(time.RFC3339)
	}
	return m.finish(ctx, other)
}

// Abort undoes a move whose claim still has its old volume.
func (m *Mover) Abort(ctx context.Context) error {
	if m.state.Step == complete {
		return fmt.Errorf("--abort: claim %s/%s has no move or recovery that is not complete", m.Namespace, m.ClaimName)
	}
	if err := m.checkCommand(); err != nil {
		return err
	}
	err := m.save(ctx, func(s *state) {
		s.Step = aborting
		m.hold(s)
	})
	if err != nil {
		return err
	}
	// From here on, no other process replaces the volume.
	current, err := m.current(ctx)
	if err != nil {
		return err
	}
	if current == newVolume {
		if err := m.enter(ctx, starting); err != nil {
			return err
		}
		remedy := "complete the move with --to " + m.state.To
		if m.Recover {
			remedy = "complete the recovery without --abort"
		}
		return fmt.Errorf("--abort: claim %s/%s already has the volume on node %s: %s", m.Namespace, m.ClaimName, m.state.To, remedy)
	}
	if err := m.restore(ctx); err != nil {
		return err
	}
	if err := m.note(ctx, "restored"); err != nil { // makes a lost claim Bound
		return err
	}
	crashpoint.Here(crashpoint.MoveAborting)
	if err := m.waitBound(ctx); err != nil {
		return err
	}
	if err := m.uncordon(ctx); err != nil {
		return err
	}
	if err := m.verify(ctx); err != nil {
		return err
	}
	if err := m.abandonCopies(ctx); err != nil {
		return err
	}
	if err := m.removeKept(ctx, false); err != nil {
		return err
	}
	m.Progress("The %s %s is undone.", m.kind(), m.state.ID)
	return m.finish(ctx, nil)
}

// abandonCopies deletes the copies of a move. The copy of a recovery existed before: only its reclaim policy is restored.
func (m *Mover) abandonCopies(ctx context.Context) error {
	if m.state.Recovery == nil {
		return m.removeCopies(ctx, m.state.Round)
	}
	_, err := m.setPolicy(ctx, m.state.Copy, m.state.Recovery.Policy, m.checkChosen)
	return absent(err)
}
