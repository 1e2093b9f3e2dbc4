package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"

	"k8s.io/klog/v2"
)

// PoolOwners records in a ConfigMap which node owns each pool. Each entry consists of a pool and the name
// of its node. The controller creates the ConfigMap and adds entries. Only an administrator changes or
// removes an entry. Several replicas may add entries concurrently. While the API server does not answer,
// Known returns the last entries read, and no entry is added.
type PoolOwners struct {
	namespace, name string
	changed         signal

	mu     sync.Mutex
	client *Client
	object *watched[ConfigMap] // nil until Run has connected
}

// NewPoolOwners returns an empty record. Run fills it from the ConfigMap.
func NewPoolOwners(namespace, name string) *PoolOwners {
	return &PoolOwners{namespace: namespace, name: name, changed: newSignal()}
}

// Run watches the ConfigMap until ctx ends.
func (o *PoolOwners) Run(ctx context.Context, connect func() (*Client, error)) {
	c := dial(ctx, connect)
	if c == nil {
		return
	}
	object := watchOne[ConfigMap](ctx, c, configMaps, o.namespace, o.name, o.changed)
	o.mu.Lock()
	o.client, o.object = c, &object
	o.mu.Unlock()
	o.changed.raise()
	<-ctx.Done()
}

// Known returns the node of each recorded pool. The caller must not change the map.
func (o *PoolOwners) Known() map[string]string {
	known, _ := o.read()
	return known.Data
}

// read returns the ConfigMap as last read. synced is false before the first read.
func (o *PoolOwners) read() (known ConfigMap, synced bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.object == nil || !o.object.synced() {
		return known, false
	}
	known, _ = o.object.one()
	return known, true
}

// Record adds entries for pools that have none, and returns when Known contains them. It must
// not be called concurrently.
func (o *PoolOwners) Record(ctx context.Context, owners map[string]string) error {
	for {
		known, synced := o.read()
		missing := map[string]any{}
		for pool, node := range owners {
			if known.Data[pool] == "" {
				missing[pool] = node
			}
		}
		if synced {
			if len(missing) == 0 {
				return nil
			}
			if err := o.add(ctx, known, missing); err != nil && !lostRace(err) {
				return fmt.Errorf("configmaps/%s: %w", o.name, err)
			}
		}
		select { // the watch reports the written entries
		case <-ctx.Done():
			return fmt.Errorf("configmaps/%s: %w: check that the API server is reachable", o.name, ctx.Err())
		case <-o.changed:
		}
	}
}

// add writes entries if the ConfigMap has not changed since it was read.
func (o *PoolOwners) add(ctx context.Context, known ConfigMap, entries map[string]any) error {
	resource := o.client.api.Resource(configMaps).Namespace(o.namespace)
	err := put(ctx, resource, "ConfigMap", o.name, known.Metadata, map[string]any{"data": entries})
	if err == nil {
		klog.FromContext(ctx).Info("Recorded the owners of pools", "configMap", o.name, "pools", len(entries))
	}
	return err
}

// MoveCommand returns the command with which an administrator changes the owner of a pool.
func (o *PoolOwners) MoveCommand(pool, node string) string {
	data, _ := json.Marshal(map[string]any{"data": map[string]string{pool: node}}) // cannot fail: these are strings
	return fmt.Sprintf("kubectl -n %s patch configmap %s --type=merge -p '%s'", o.namespace, o.name, data)
}
