package kube

import (
	"context"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// The resources that kubectl trivet protect reads and writes in addition.
var (
	cronJobs        = schema.GroupVersionResource{Group: "batch", Version: "v1", Resource: "cronjobs"}
	roleBindings    = schema.GroupVersionResource{Group: rbacGroup, Version: "v1", Resource: "rolebindings"}
	serviceAccounts = schema.GroupVersionResource{Version: "v1", Resource: "serviceaccounts"}
)

// rbacGroup is the API group of roles and their bindings.
const rbacGroup = "rbac.authorization.k8s.io"

// CronJob is batch/v1 CronJob.
type CronJob struct {
	Metadata Meta `json:"metadata"`
	Spec     struct {
		Schedule string `json:"schedule"`
	} `json:"spec"`
	Status struct {
		// Both times are in the format of RFC 3339, in UTC.
		LastScheduleTime   string `json:"lastScheduleTime"`
		LastSuccessfulTime string `json:"lastSuccessfulTime"`
	} `json:"status"`
}

// ServiceAccount is core/v1 ServiceAccount.
type ServiceAccount struct {
	Metadata Meta `json:"metadata"`
}

// CronJobs lists the CronJobs of a namespace that match a label selector.
func (c *Client) CronJobs(ctx context.Context, namespace, selector string) ([]CronJob, error) {
	return list[CronJob](ctx, c.api.Resource(cronJobs).Namespace(namespace), selector)
}

// PutCronJob creates a CronJob, or gives an existing one the annotations and the specification of object.
func (c *Client) PutCronJob(ctx context.Context, namespace, name string, object Object) error {
	resource := c.api.Resource(cronJobs).Namespace(namespace)
	for {
		current, err := get[CronJob](ctx, resource, name)
		switch {
		case apierrors.IsNotFound(err):
			return create(ctx, resource, "batch/v1", "CronJob", object)
		case err != nil:
			return err
		}
		annotations := object["metadata"].(map[string]any)["annotations"]
		fields := map[string]any{"metadata": map[string]any{"annotations": annotations}, "spec": object["spec"]}
		if _, err = patch[struct{}](ctx, resource, current.Metadata, fields); !apierrors.IsConflict(err) { // its controller writes the status
			return err
		}
	}
}

// DeleteCronJob deletes a CronJob after its Jobs and their pods are deleted. It returns before that.
func (c *Client) DeleteCronJob(ctx context.Context, namespace, name string) error {
	policy := metav1.DeletePropagationForeground
	return absent(c.api.Resource(cronJobs).Namespace(namespace).Delete(ctx, name, metav1.DeleteOptions{PropagationPolicy: &policy}))
}

// ServiceAccounts lists the ServiceAccounts of a namespace that match a label selector.
func (c *Client) ServiceAccounts(ctx context.Context, namespace, selector string) ([]ServiceAccount, error) {
	return list[ServiceAccount](ctx, c.api.Resource(serviceAccounts).Namespace(namespace), selector)
}

// Bind gives a ServiceAccount the rights of a ClusterRole in a namespace, by the RoleBinding name.
func (c *Client) Bind(ctx context.Context, namespace, name string, labels map[string]any, clusterRole string, account Meta) error {
	err := create(ctx, c.api.Resource(roleBindings).Namespace(namespace), rbacGroup+"/v1", "RoleBinding", Object{
		"metadata": map[string]any{"name": name, "labels": labels},
		"roleRef":  map[string]any{"apiGroup": rbacGroup, "kind": "ClusterRole", "name": clusterRole},
		"subjects": []any{map[string]any{"kind": "ServiceAccount", "namespace": account.Namespace, "name": account.Name}},
	})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// Unbind deletes a RoleBinding. It succeeds if there is none.
func (c *Client) Unbind(ctx context.Context, namespace, name string) error {
	return absent(c.api.Resource(roleBindings).Namespace(namespace).Delete(ctx, name, metav1.DeleteOptions{}))
}
