package move

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/trivet-csi/trivet/cluster/kube"
)

// The names with which a move marks objects.
const (
	// stateAnnotation is the annotation of a claim that contains the state of its move.
	stateAnnotation = "csi.trivet.dev/move"
	// movedFromLabel is the label of the PersistentVolume of the old volume. Its value is the name of the claim.
	movedFromLabel = "csi.trivet.dev/moved-from"
)

// step is a step of a move.
type step string

// The steps of a move in their order, and that of its abort.
const (
	copying  step = "copy"  // the pods run; copies of the volume are created on the other node
	stopping step = "stop"  // the pods are stopped
	catching step = "last"  // the last copy is created
	swapping step = "swap"  // the PersistentVolume of the claim is replaced
	starting step = "start" // the pods start on the other node
	cleaning step = "clean" // the old volume and the temporary objects are deleted
	complete step = ""      // there is no annotation
	aborting step = "abort" // everything is undone
)

// state is the state of a move.
type state struct {
	ID   string `json:"id"`
	From string `json:"from"`
	To   string `json:"to"`
	// SnapshotClass is the class of the snapshots.
	SnapshotClass string `json:"snapshotClass"`
	Step          step   `json:"step"`
	// Round is the number of the newest copy. It may not exist yet.
	Round int `json:"round"`
	// Single is true if the node To has no room for two copies.
	Single bool `json:"single,omitempty"`
	// Used is true if pods used the claim, so that the move waits until one runs again.
	Used bool `json:"used,omitempty"`
	// Cordoned is true if the move cordons the node From.
	Cordoned bool `json:"cordoned,omitempty"`
	Keep     bool `json:"keep,omitempty"`
	// Old is the manifest of the PersistentVolume before the move.
	Old kube.Object `json:"old"`
	// New is the manifest of the PersistentVolume after the move. Copy is the name of the PersistentVolume of the last copy,
	// which has the same volume.
	New  kube.Object `json:"new,omitempty"`
	Copy string      `json:"copy,omitempty"`
}

// errChanged is returned if the annotation is not as this process wrote it.
var errChanged = errors.New("another command has changed the state of this move: wait until it has ended, then run this command again")

// readState returns the state in the annotation of a claim. There is none if the step is complete.
func readState(claim kube.Claim) (s state, err error) {
	text := claim.Metadata.Annotations[stateAnnotation]
	if text == "" {
		return s, nil
	}
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		return s, fmt.Errorf("claim %s/%s: annotation %s: %w: it is not the state of a move", claim.Metadata.Namespace, claim.Metadata.Name, stateAnnotation, err)
	}
	return s, nil
}

// save writes a changed state, unless another process has changed it. other are annotations to write together with it.
func (m *Mover) save(ctx context.Context, change func(*state), other map[string]any) error {
	next := m.state
	change(&next)
	annotations := map[string]any{stateAnnotation: nil}
	if next.Step != complete {
		text, err := json.Marshal(next)
		if err != nil {
			return err
		}
		annotations[stateAnnotation] = string(text)
	}
	for key, value := range other {
		annotations[key] = value
	}
	for {
		current, err := m.api.Claim(ctx, m.Namespace, m.ClaimName)
		switch {
		case err != nil:
			return err
		case current.Metadata.UID != m.claim.Metadata.UID || current.Metadata.Annotations[stateAnnotation] != m.claim.Metadata.Annotations[stateAnnotation]:
			return errChanged
		}
		current, err = m.api.AnnotateClaim(ctx, current.Metadata, annotations)
		if apierrors.IsConflict(err) {
			continue
		}
		if err == nil {
			m.state, m.claim = next, current
		}
		return err
	}
}

// enter writes that the next step begins.
func (m *Mover) enter(ctx context.Context, next step) error {
	return m.save(ctx, func(s *state) { s.Step = next }, nil)
}
