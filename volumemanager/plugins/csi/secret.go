package csi

import (
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// secret is what a driver is given of a Secret; none without a reference.
func (p *Plugin) secret(ref *corev1.SecretReference) (map[string]string, error) {
	if ref == nil {
		return nil, nil
	}
	s, err := p.host.Secret(ref.Namespace, ref.Name)
	if err != nil {
		return nil, fmt.Errorf("secret %s/%s: %w: the driver is to be given it", ref.Namespace, ref.Name, err)
	}
	values := make(map[string]string, len(s.Data)+len(s.StringData))
	for key, value := range s.Data {
		values[key] = string(value)
	}
	return merged(values, s.StringData), nil
}

// secretIfThere is secret for calls that take something away: a Secret may go before its
// volume, and the driver says if it cannot do without.
func (p *Plugin) secretIfThere(ref *corev1.SecretReference) (map[string]string, error) {
	values, err := p.secret(ref)
	if errors.Is(err, plugins.ErrNotFound) {
		return nil, nil
	}
	return values, err
}
