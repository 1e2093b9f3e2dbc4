package kubectl

import (
	"cmp"
	"context"
	"slices"
	"strings"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/status"
)

// Volume is a volume with the objects of Kubernetes that belong to it.
type Volume struct {
	status.Volume
	// PersistentVolume and Claim are empty for a volume that has none. Claim is namespace/name.
	PersistentVolume string `json:"persistentVolume,omitempty"`
	Claim            string `json:"claim,omitempty"`
	StorageClass     string `json:"storageClass,omitempty"`
	// Phase is the phase of the PersistentVolume. The claim of a PersistentVolume that is Released no longer exists.
	Phase string `json:"persistentVolumePhase,omitempty"`
	// Pods are the pods that use the claim, as namespace/name.
	Pods      []string `json:"pods,omitempty"`
	Snapshots int      `json:"snapshots"`
}

// Volumes joins the volumes of a report with PersistentVolumes, claims and pods.
func (c *Cluster) Volumes(ctx context.Context, r status.Report) ([]Volume, error) {
	volumes, err := c.PersistentVolumes(ctx, r.Driver)
	if err != nil {
		return nil, needs(err, "list persistentvolumes")
	}
	pods, err := c.Pods(ctx, "", "")
	if err != nil {
		return nil, needs(err, "list pods in all namespaces")
	}
	return join(r, volumes, pods), nil
}

func join(r status.Report, persistent []kube.PersistentVolume, pods []kube.Pod) []Volume {
	byHandle := map[string]kube.PersistentVolume{}
	for _, v := range persistent {
		byHandle[v.Spec.CSI.VolumeHandle] = v
	}
	users := usersByClaim(pods)
	snapshots := r.SnapshotCounts()
	joined := make([]Volume, 0, len(r.Volumes))
	for _, v := range r.Volumes {
		own := Volume{Volume: v, Snapshots: snapshots[v.ID]}
		if v.Pod != "" {
			own.Pods = []string{v.Pod}
		}
		if p, ok := byHandle[v.ID]; ok && v.ID != "" {
			own.PersistentVolume, own.StorageClass, own.Phase = p.Metadata.Name, p.Spec.StorageClassName, p.Status.Phase
			if ref := p.Spec.ClaimRef; ref.Name != "" {
				own.Claim = ref.Namespace + "/" + ref.Name
			}
			if own.Phase != "Released" { // otherwise another claim of that name may exist
				own.Pods = users[own.Claim]
			}
		}
		joined = append(joined, own)
	}
	slices.SortStableFunc(joined, func(a, b Volume) int {
		return strings.Compare(cmp.Or(a.Claim, a.Name), cmp.Or(b.Claim, b.Name))
	})
	return joined
}

// usersByClaim returns the pods that use each claim. Both are namespace/name. A completed pod uses no claim.
func usersByClaim(pods []kube.Pod) map[string][]string {
	users := map[string][]string{}
	for _, p := range pods {
		if p.Status.Phase == "Succeeded" || p.Status.Phase == "Failed" {
			continue
		}
		for _, v := range p.Spec.Volumes {
			if claim := v.ClaimName(p.Metadata.Name); claim != "" {
				key := p.Metadata.Namespace + "/" + claim
				users[key] = append(users[key], p.Metadata.Namespace+"/"+p.Metadata.Name)
			}
		}
	}
	return users
}
