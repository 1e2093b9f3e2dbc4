package csi

import (
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// secret returns the values of a Secret; nil without a reference.
func (p *Plugin) secret(ref *corev1.SecretReference) (map[string]string, error) {
	if ref == nil {
		return nil, nil
	}
	s, err := p.host.Secret(ref.Namespace, ref.Name)
	if err != nil {
		return nil, fmt.Errorf("secret %s/%s: %w: the driver needs it", ref.Namespace, ref.Name, err)
	}
	return plugins.Strings(s.Data), nil
}

// secretIfPresent is secret for calls that remove something: a Secret may be deleted before its
// volume. The driver fails the call if it needs the Secret.
func (p *Plugin) secretIfPresent(ref *corev1.SecretReference) (map[string]string, error) {
	values, err := p.secret(ref)
	if errors.Is(err, plugins.ErrNotFound) {
		return nil, nil
	}
	return values, err
}
