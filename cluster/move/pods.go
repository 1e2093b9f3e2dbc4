package move

import (
	"context"
	"fmt"
	"slices"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/status"
)

// mirrorAnnotation is the annotation of the object that represents a static pod.
const mirrorAnnotation = "kubernetes.io/config.mirror"

// pods returns the pods of the claim, also those that have completed.
func (m *Mover) pods(ctx context.Context) ([]kube.Pod, error) {
	all, err := m.api.Pods(ctx, m.Namespace, "")
	return slices.DeleteFunc(all, func(p kube.Pod) bool { return !slices.Contains(p.Claims(), m.ClaimName) }), err
}

// users returns the pods that use the claim. A completed pod uses no claim.
func (m *Mover) users(ctx context.Context) ([]kube.Pod, error) {
	all, err := m.pods(ctx)
	return slices.DeleteFunc(all, kube.Pod.Completed), err
}

// checkPods checks that pods can be stopped and that new ones can run on node to.
func (m *Mover) checkPods(ctx context.Context, pods []kube.Pod, from, to string) (planned []PlannedPod, err error) {
	for _, pod := range pods {
		controller, err := m.checkController(ctx, pod, from)
		if err != nil {
			return nil, err
		}
		reason, err := m.api.Unfit(ctx, pod.Metadata, to)
		if err != nil {
			return nil, err
		}
		if reason != "" {
			return nil, refusal(pod, "cannot run on node %s: %s", to, reason)
		}
		if err := m.checkOtherClaims(ctx, pod, to); err != nil {
			return nil, err
		}
		planned = append(planned, PlannedPod{pod.Metadata.Name, controller})
	}
	return planned, nil
}

// refusal returns an error about a pod.
func refusal(pod kube.Pod, format string, args ...any) error {
	return fmt.Errorf("pod %s/%s, which uses the claim, %s", pod.Metadata.Namespace, pod.Metadata.Name, fmt.Sprintf(format, args...))
}

// checkController checks that a controller creates a new pod, and that the scheduler does not place it on a cordoned node. It
// returns the controller.
func (m *Mover) checkController(ctx context.Context, pod kube.Pod, from string) (string, error) {
	owner, managed := pod.Metadata.Controller()
	switch _, mirror := pod.Metadata.Annotations[mirrorAnnotation]; {
	case mirror:
		return "", refusal(pod, "is a static pod of node %s, which the kubelet starts again: remove its manifest", pod.Spec.NodeName)
	case !managed:
		return "", refusal(pod, "has no controller that would create it on the other node: delete the pod, and create it again after the move")
	case owner.Kind == "DaemonSet":
		return "", refusal(pod, "belongs to %s %s, which runs it on each node: only the volumes of pods that can run on any node can be moved", owner.Kind, owner.Name)
	case pod.Spec.NodeName != "" && pod.Spec.NodeName != from:
		return "", refusal(pod, "is on node %s, and not on that of the volume, %s", pod.Spec.NodeName, from)
	}
	tolerates, err := m.api.ToleratesCordon(ctx, pod.Metadata)
	if tolerates {
		return "", refusal(pod, "tolerates the taint node.kubernetes.io/unschedulable, so that a new pod would start on the old node: remove the toleration, or scale %s/%s to 0", owner.Kind, owner.Name)
	}
	return owner.Kind + "/" + owner.Name, err
}

// checkOtherClaims checks that the volumes of the pod's other claims can be reached from node to.
func (m *Mover) checkOtherClaims(ctx context.Context, pod kube.Pod, to string) error {
	for _, name := range pod.Claims() {
		if name == m.ClaimName {
			continue
		}
		claim, err := m.api.Claim(ctx, m.Namespace, name)
		if err != nil {
			return err
		}
		if claim.Spec.VolumeName == "" {
			continue
		}
		reachable, err := m.api.Reachable(ctx, claim.Spec.VolumeName, to)
		if err != nil {
			return err
		}
		if !reachable {
			return refusal(pod, "also uses claim %s, whose volume cannot be reached from node %s: only a pod whose other volumes can be reached from there can be moved", name, to)
		}
	}
	return nil
}

// scheduled reports whether one of the pods of the claim is on a node, where it may write to the volume, or has completed there
// and is not one of those that had ended before.
func scheduled(pods []kube.Pod, ended []string) bool {
	return slices.ContainsFunc(pods, func(p kube.Pod) bool {
		return p.Spec.NodeName != "" && (!p.Completed() || !slices.Contains(ended, p.Metadata.UID))
	})
}

// completed returns the UIDs of the pods that have completed.
func completed(pods []kube.Pod) (uids []string) {
	for _, p := range pods {
		if p.Completed() {
			uids = append(uids, p.Metadata.UID)
		}
	}
	return uids
}

// attached reports whether the volume is attached to a node.
func (m *Mover) attached(ctx context.Context) (bool, error) {
	all, err := m.api.VolumeAttachments(ctx)
	return slices.ContainsFunc(all, func(a kube.VolumeAttachment) bool {
		return a.Spec.Source.PersistentVolumeName == m.claim.Spec.VolumeName
	}), err
}

// released reports whether the volume is not staged on its node: it is not attached, or the driver reports that it is not
// staged. The driver knows it seconds earlier, and without attachments only the driver knows it. If it does not report, the reason is
// printed unless it is the one that was shown last.
func (m *Mover) released(ctx context.Context, shown *string) (bool, error) {
	handle, driver := m.oldHandle()
	d, err := m.api.CSIDriver(ctx, driver)
	if err != nil {
		return false, err
	}
	if d.Spec.AttachRequired {
		attached, err := m.attached(ctx)
		if err != nil || !attached {
			return err == nil, err
		}
	}
	report, err := m.nodeReport(ctx, m.state.From)
	if err != nil {
		m.show(shown, fmt.Sprintf("The driver on node %s does not report yet whether the volume is mounted: %v", m.state.From, err))
		return false, nil
	}
	i := slices.IndexFunc(report.Volumes, func(v status.Volume) bool { return v.ID == handle })
	return i >= 0 && !report.Volumes[i].Staged, nil
}

// oldHandle returns the handle and the driver of the old volume.
func (m *Mover) oldHandle() (handle, driver string) {
	old, _ := kube.AsPersistentVolume(m.state.Old) // cannot fail: it was read in this form
	return old.Spec.CSI.VolumeHandle, old.Spec.CSI.Driver
}
