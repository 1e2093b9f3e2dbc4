package move

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/internal/crashpoint"
)

// stop stops the pods that use the claim. Their controllers create new pods, which stay Pending, because the
// PersistentVolume allows only the node From, and that is cordoned.
func (m *Mover) stop(ctx context.Context) error {
	if current, err := m.current(ctx); err != nil || current == newVolume {
		return cmp.Or(err, errChanged)
	}
	pods, err := m.users(ctx)
	if err != nil {
		return err
	}
	if _, err := m.checkPods(ctx, pods, m.state.From, m.state.To); err != nil {
		return err
	}
	if err := m.cordon(ctx); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.MoveCordoned)
	sent, err := m.removeSuperfluous(ctx)
	if err != nil {
		return err
	}
	m.times = times{stopped: time.Now()}
	ended, err := m.evictAll(ctx)
	if err != nil {
		return err
	}
	round := m.state.Round + 1
	if sent {
		if sent, err = m.beingSent(ctx); err != nil || !sent {
			return err // the step is repeated
		}
		round = m.state.Round
	}
	crashpoint.Here(crashpoint.MoveStopped)
	m.times.ended = time.Now()
	if err := m.restore(ctx); err != nil {
		return err
	}
	return m.save(ctx, func(s *state) {
		s.Step, s.Round, s.Used, s.Ended, s.Detaching = catching, round, s.Used || len(pods) > 0, ended, false
	})
}

// removeSuperfluous removes the copies that the last one does not need. sent is true if the newest one is being sent from a volume that
// no pod can use meanwhile, so that it can become the last one.
func (m *Mover) removeSuperfluous(ctx context.Context) (sent bool, err error) {
	last := m.state.Round
	if m.state.Single {
		sent, err = m.beingSent(ctx)
	}
	if !m.state.Single || sent {
		last--
	}
	if err != nil {
		return false, err
	}
	return sent, m.removeCopies(ctx, last)
}

// cordon cordons the node From, unless it is cordoned already.
func (m *Mover) cordon(ctx context.Context) error {
	node, err := m.api.Node(ctx, m.state.From)
	if err != nil || node.Spec.Unschedulable {
		return absent(err)
	}
	if !m.state.Cordoned {
		if err := m.save(ctx, func(s *state) { s.Cordoned = true }); err != nil {
			return err
		}
	}
	m.Progress("Node %s is cordoned until the claim has the new volume.", m.state.From)
	return m.api.Cordon(ctx, m.state.From, true)
}

// evictAll evicts the pods that use the claim, and waits until the volume is not used. It returns the pods that have completed.
func (m *Mover) evictAll(ctx context.Context) (ended []string, err error) {
	shown, evicted := "", map[string]bool{}
	err = m.until(ctx, m.Timeout, fmt.Sprintf("the volume is not used on node %s: see 'kubectl describe persistentvolumeclaim -n %s %s'", m.state.From, m.Namespace, m.ClaimName), func() (bool, error) {
		if err := m.cordon(ctx); err != nil {
			return false, err
		}
		pods, err := m.pods(ctx)
		if err != nil {
			return false, err
		}
		for _, pod := range pods {
			if pod.Completed() || pod.Spec.NodeName == "" || pod.Metadata.DeletionTimestamp != "" {
				continue
			}
			if err := m.evict(ctx, pod, evicted, &shown); err != nil {
				return false, err
			}
		}
		ended = completed(pods)
		if scheduled(pods, ended) {
			return false, nil
		}
		if released, err := m.released(ctx, &shown); err != nil || !released {
			return false, err
		}
		begin := now() // the driver may have reported for seconds
		if pods, err = m.pods(ctx); err != nil || scheduled(pods, ended) {
			return false, err
		}
		m.unused = begin
		return true, nil
	})
	return ended, err
}

// evict evicts a pod. If a PodDisruptionBudget does not allow it now, it is repeated later.
func (m *Mover) evict(ctx context.Context, pod kube.Pod, evicted map[string]bool, shown *string) error {
	if _, err := m.checkController(ctx, pod, m.state.From); err != nil {
		return err
	}
	err := m.api.Evict(ctx, pod.Metadata)
	switch {
	case apierrors.IsTooManyRequests(err):
		m.show(shown, fmt.Sprintf("Pod %s is not evicted yet: %v", pod.Metadata.Name, err))
		return nil
	case apierrors.IsConflict(err): // the pod or its budget has changed
		return nil
	case err != nil:
		return fmt.Errorf("evicting pod %s: %w", pod.Metadata.Name, err)
	case !evicted[pod.Metadata.UID]:
		evicted[pod.Metadata.UID] = true
		m.Progress("Pod %s is evicted.", pod.Metadata.Name)
	}
	return nil
}

// show prints a message unless it is the one that was shown last.
func (m *Mover) show(shown *string, message string) {
	if message != *shown {
		*shown = message
		m.Progress("%s", message)
	}
}

// start waits until the pods run on the node To.
func (m *Mover) start(ctx context.Context) error {
	if err := m.waitBound(ctx); err != nil {
		return err
	}
	m.times.swapped = time.Now()
	if err := m.uncordon(ctx); err != nil {
		return err
	}
	if m.state.Used {
		if err := m.waitRunning(ctx); err != nil {
			return err
		}
		if times := m.times.String(); times != "" {
			m.Progress("The pods were stopped for %s.", times)
		}
		crashpoint.Here(crashpoint.MoveRunning)
	}
	return m.enter(ctx, cleaning)
}

// uncordon undoes cordon.
func (m *Mover) uncordon(ctx context.Context) error {
	if !m.state.Cordoned || m.StayCordoned {
		return nil
	}
	if err := absent(m.api.Cordon(ctx, m.state.From, false)); err != nil {
		return fmt.Errorf("uncordoning node %s: %w", m.state.From, err)
	}
	return m.save(ctx, func(s *state) { s.Cordoned = false })
}

// waitRunning waits until a pod that uses the claim runs on the node To, or has completed there after the swap began. It also
// succeeds if no pod uses the claim after the timeout, because its controller may have been scaled down.
func (m *Mover) waitRunning(ctx context.Context) error {
	kept, err := m.view(ctx, m.keptName())
	if err := absent(err); err != nil {
		return err
	}
	var seen []string
	err = m.until(ctx, m.Timeout, "a pod runs on node "+m.state.To, func() (bool, error) {
		pods, err := m.pods(ctx)
		seen = nil
		for _, p := range pods {
			ran := p.Status.Phase == "Succeeded" && p.Status.StartTime >= kept.Metadata.CreationTimestamp
			if p.Spec.NodeName == m.state.To && (ran || p.Status.Phase == "Running") {
				return true, err
			}
			if !p.Completed() {
				seen = append(seen, p.Metadata.Name)
			}
		}
		return false, err
	})
	if err == nil || ctx.Err() != nil || errors.As(err, new(apierrors.APIStatus)) {
		return err
	}
	if len(seen) == 0 {
		m.Progress("No pod uses the claim.")
		return nil
	}
	return fmt.Errorf("%w: see 'kubectl describe pod -n %s %s': the old volume is kept until then", err, m.Namespace, strings.Join(seen, " "))
}
