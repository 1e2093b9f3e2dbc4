package move

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/trivet-csi/trivet/cluster/kube"
)

// The names with which a move marks objects.
const (
	// moveLabel is the label of the objects that exist only during a move. Its value is the ID of the move. The annotation of
	// this name shows the step in the claim. A move never reads it, because users who can write claims can write it. A
	// protection makes no copy while the claim has it.
	moveLabel = kube.MoveKey
	// movedFromLabel is the label of the PersistentVolume of the old volume. Its value is the name of the claim.
	movedFromLabel = "csi.trivet.dev/moved-from"
	// stateKey is the key of the state in its ConfigMap.
	stateKey = "state"
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
	complete step = ""      // there is no ConfigMap
	aborting step = "abort" // everything is undone
)

// state is the state of a move.
type state struct {
	ID string `json:"id"`
	// Namespace, Claim and UID are those of the claim.
	Namespace string `json:"namespace"`
	Claim     string `json:"claim"`
	UID       string `json:"uid"`
	// Holder is random, and written first by each process, so that an older one finds another state than it wrote.
	Holder string `json:"holder"`
	From   string `json:"from"`
	To     string `json:"to"`
	// SnapshotClass is the class of the snapshots. It is empty if the volume is copied without snapshots.
	SnapshotClass string `json:"snapshotClass"`
	Step          step   `json:"step"`
	// Round is the number of the newest copy. It may not exist yet.
	Round int `json:"round"`
	// Single is true if nothing is copied while the pods run.
	Single bool `json:"single,omitempty"`
	// Locked is true if the volume cannot be used while it is copied.
	Locked bool `json:"locked,omitempty"`
	// Used is true if pods used the claim, so that the move waits until one runs again.
	Used bool `json:"used,omitempty"`
	// Cordoned is true if the move cordons the node From.
	Cordoned bool `json:"cordoned,omitempty"`
	Keep     bool `json:"keep,omitempty"`
	// Ended contains the UIDs of the pods that had completed when the last stop ended.
	Ended []string `json:"ended,omitempty"`
	// Detaching is true while the reclaim policy of the PersistentVolume may not be that of Old.
	Detaching bool `json:"detaching,omitempty"`
	// Recovery is set if the node From is lost, so that the claim gets a copy that exists already.
	Recovery *recovery `json:"recovery,omitempty"`
	// Old is the manifest of the PersistentVolume before the move.
	Old kube.Object `json:"old"`
	// New is the manifest of the PersistentVolume after the move. Copy is the name of the PersistentVolume of the last copy,
	// which has the same volume. CopyUID is the UID of the copy's claim, and CopyRound the number of the copy; the states of
	// earlier versions have neither.
	New       kube.Object `json:"new,omitempty"`
	Copy      string      `json:"copy,omitempty"`
	CopyUID   string      `json:"copyUID,omitempty"`
	CopyRound int         `json:"copyRound,omitempty"`
}

// recovery is the copy that a claim gets after its node was lost.
type recovery struct {
	// Claim is the name of the copy's claim. Policy was the reclaim policy of its PersistentVolume.
	Claim  string `json:"claim"`
	Policy string `json:"policy"`
	// Snapshotted is the time of the data.
	Snapshotted time.Time `json:"snapshotted"`
}

// errChanged is returned if the ConfigMap is not as this process wrote it.
var errChanged = errors.New("another command has changed the state of this move: wait until it has ended, then run this command again")

// recordName returns the name of the ConfigMap with the state of the move of a claim.
func recordName(uid string) string { return "trivet-move-" + uid }

// readState returns the state in a ConfigMap.
func readState(record kube.ConfigMap) (s state, err error) {
	known := []step{copying, stopping, catching, swapping, starting, cleaning, aborting}
	err = json.Unmarshal([]byte(record.Data[stateKey]), &s)
	if err == nil && (recordName(s.UID) != record.Metadata.Name || !slices.Contains(known, s.Step)) {
		err = fmt.Errorf("UID %q, step %q", s.UID, s.Step)
	}
	if err != nil {
		err = fmt.Errorf("ConfigMap %s/%s: %w: it is not the state of a move", record.Metadata.Namespace, record.Metadata.Name, err)
	}
	return s, err
}

// save writes a changed state, unless another process has changed it, and the step into the annotation of the claim.
func (m *Mover) save(ctx context.Context, change func(*state)) error {
	next := m.state
	change(&next)
	text, err := json.Marshal(next)
	if err != nil {
		return err
	}
	record, err := m.write(ctx, next.ID, string(text))
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err) {
		// The response of an earlier write may have been lost.
		record, err = m.api.ConfigMap(ctx, m.api.Namespace, recordName(m.claim.Metadata.UID))
		if apierrors.IsNotFound(err) || err == nil && record.Data[stateKey] != string(text) {
			return errChanged
		}
	}
	if err != nil {
		return fmt.Errorf("writing ConfigMap %s/%s: %w", m.api.Namespace, recordName(m.claim.Metadata.UID), err)
	}
	m.state, m.record = next, record.Metadata
	return m.note(ctx, string(next.Step))
}

// write creates or changes the ConfigMap.
func (m *Mover) write(ctx context.Context, id, text string) (kube.ConfigMap, error) {
	if m.record.Name != "" {
		return m.api.ChangeConfigMap(ctx, m.record, map[string]any{stateKey: text})
	}
	return m.api.CreateConfigMap(ctx, m.api.Namespace, kube.Object{
		"metadata": map[string]any{"name": recordName(m.claim.Metadata.UID), "labels": map[string]any{moveLabel: id}},
		"data":     map[string]any{stateKey: text},
	})
}

// enter writes that the next step begins.
func (m *Mover) enter(ctx context.Context, next step) error {
	return m.save(ctx, func(s *state) { s.Step = next })
}

// hold makes this process the only one that can continue the move.
func (m *Mover) hold(s *state) { s.Holder = uuid.NewString() }

// verify returns errChanged unless the ConfigMap is as this process has last written it.
func (m *Mover) verify(ctx context.Context) error {
	current, err := m.api.ConfigMap(ctx, m.api.Namespace, m.record.Name)
	if apierrors.IsNotFound(err) || err == nil && current.Metadata.ResourceVersion != m.record.ResourceVersion {
		return errChanged
	}
	return err
}

// finish removes the annotation, sets others, and removes the state last.
func (m *Mover) finish(ctx context.Context, others map[string]any) error {
	annotations := map[string]any{moveLabel: nil}
	for key, value := range others {
		annotations[key] = value
	}
	if err := m.annotate(ctx, annotations); err != nil {
		return err
	}
	err := m.api.DeleteConfigMap(ctx, m.record)
	if apierrors.IsConflict(err) {
		return errChanged
	}
	if err := absent(err); err != nil {
		return fmt.Errorf("deleting ConfigMap %s/%s: %w", m.api.Namespace, m.record.Name, err)
	}
	m.state.Step = complete
	return nil
}

// note writes into the annotation of the claim what the move does. The controller of PersistentVolumes examines a lost claim
// when the claim changes, otherwise after 15 seconds.
func (m *Mover) note(ctx context.Context, what string) error {
	return m.annotate(ctx, map[string]any{moveLabel: m.state.ID + " " + what})
}

// annotate sets annotations of the claim, and reads it.
func (m *Mover) annotate(ctx context.Context, annotations map[string]any) error {
	for {
		current, err := m.api.Claim(ctx, m.Namespace, m.ClaimName)
		if err != nil {
			return err
		}
		if current.Metadata.UID != m.claim.Metadata.UID {
			return fmt.Errorf("claim %s/%s was deleted and created again during its move", m.Namespace, m.ClaimName)
		}
		current, err = m.api.AnnotateClaim(ctx, current.Metadata, annotations)
		if apierrors.IsConflict(err) {
			continue
		}
		if err == nil {
			m.claim = current
		}
		return err
	}
}
