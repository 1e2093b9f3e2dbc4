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
		return nil, fmt.Errorf("secret %s/%s: %w: add the Secret, which the driver needs", ref.Namespace, ref.Name, err)
	}
	return plugins.Strings(s.Data), nil
}

// secretIfPresent is secret for calls that undo something. It returns nil if the Secret does not exist,
// because a Secret may be deleted before its volume. A driver that needs the Secret refuses the call.
func (p *Plugin) secretIfPresent(ref *corev1.SecretReference) (map[string]string, error) {
	values, err := p.secret(ref)
	if errors.Is(err, plugins.ErrNotFound) {
		return nil, nil
	}
	return values, err
}
