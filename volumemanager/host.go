package volumemanager

import (
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/manifest"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/token"
)

// host implements plugins.Host.
type host struct {
	*token.Signer
	paths plugins.Paths
	node  string
	// objects is nil before the first manifests were read.
	objects atomic.Pointer[manifest.Objects]
}

func (h *host) Paths() plugins.Paths { return h.paths }

func (h *host) NodeName() string { return h.node }

func (h *host) ConfigMap(namespace, name string) (*corev1.ConfigMap, error) {
	return find(h.manifests().ConfigMaps, namespace, name)
}

func (h *host) Secret(namespace, name string) (*corev1.Secret, error) {
	return find(h.manifests().Secrets, namespace, name)
}

func (h *host) CSIDriver(name string) *storagev1.CSIDriver { return h.manifests().Drivers[name] }

// manifests returns the last manifests. Before the first manifests were read, it returns empty Objects.
func (h *host) manifests() *manifest.Objects {
	if o := h.objects.Load(); o != nil {
		return o
	}
	return &manifest.Objects{}
}

// find returns an object or plugins.ErrNotFound, to which the caller adds the name.
func find[T any](in map[types.NamespacedName]*T, namespace, name string) (*T, error) {
	if o := in[types.NamespacedName{Namespace: namespace, Name: name}]; o != nil {
		return o, nil
	}
	return nil, plugins.ErrNotFound
}
