package kube

import (
	"context"
	"fmt"
	"reflect"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// The resources that kubectl trivet protect reads and writes in addition.
var (
	cronJobs        = schema.GroupVersionResource{Group: "batch", Version: "v1", Resource: "cronjobs"}
	jobs            = schema.GroupVersionResource{Group: "batch", Version: "v1", Resource: "jobs"}
	roleBindings    = schema.GroupVersionResource{Group: rbacGroup, Version: "v1", Resource: "rolebindings"}
	serviceAccounts = schema.GroupVersionResource{Version: "v1", Resource: "serviceaccounts"}
)

// rbacGroup is the API group of roles and their bindings.
const rbacGroup = "rbac.authorization.k8s.io"

// CronJob is batch/v1 CronJob.
type CronJob struct {
	Metadata Meta `json:"metadata"`
	Spec     struct {
		JobTemplate struct {
			Spec struct {
				Template struct {
					Spec struct {
						ServiceAccountName string      `json:"serviceAccountName"`
						Containers         []Container `json:"containers"`
					} `json:"spec"`
				} `json:"template"`
			} `json:"spec"`
		} `json:"jobTemplate"`
	} `json:"spec"`
	Status struct {
		// Both times are in the format of RFC 3339, in UTC.
		LastScheduleTime   string `json:"lastScheduleTime"`
		LastSuccessfulTime string `json:"lastSuccessfulTime"`
	} `json:"status"`
}

// Job is batch/v1 Job.
type Job struct {
	Metadata Meta `json:"metadata"`
	Status   struct {
		Conditions []Condition `json:"conditions"`
	} `json:"status"`
}

// Ended reports whether the Job has succeeded or failed.
func (j Job) Ended() bool {
	for _, c := range j.Status.Conditions {
		if c.Status == "True" && (c.Type == "Complete" || c.Type == "Failed") {
			return true
		}
	}
	return false
}

// ServiceAccount is core/v1 ServiceAccount.
type ServiceAccount struct {
	Metadata Meta `json:"metadata"`
}

// CronJobs lists the CronJobs of a namespace that match a label selector.
func (c *Client) CronJobs(ctx context.Context, namespace, selector string) ([]CronJob, error) {
	return list[CronJob](ctx, c.api.Resource(cronJobs).Namespace(namespace), selector)
}

// CronJob returns a CronJob.
func (c *Client) CronJob(ctx context.Context, namespace, name string) (CronJob, error) {
	return get[CronJob](ctx, c.api.Resource(cronJobs).Namespace(namespace), name)
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

// SuspendCronJob makes a CronJob create no more Jobs. It succeeds if there is none.
func (c *Client) SuspendCronJob(ctx context.Context, namespace, name string) error {
	_, err := patch[struct{}](ctx, c.api.Resource(cronJobs).Namespace(namespace), Meta{Name: name}, map[string]any{"spec": map[string]any{"suspend": true}})
	return absent(err)
}

// Jobs lists the Jobs of a namespace that match a label selector.
func (c *Client) Jobs(ctx context.Context, namespace, selector string) ([]Job, error) {
	return list[Job](ctx, c.api.Resource(jobs).Namespace(namespace), selector)
}

// DeleteJob deletes a Job after its pods are deleted. It returns before that. It succeeds if there is none.
func (c *Client) DeleteJob(ctx context.Context, namespace, name string) error {
	policy := metav1.DeletePropagationForeground
	return absent(c.api.Resource(jobs).Namespace(namespace).Delete(ctx, name, metav1.DeleteOptions{PropagationPolicy: &policy}))
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

// Bind gives a ServiceAccount the rights of a ClusterRole in a namespace, by the RoleBinding name. An existing RoleBinding that gives
// other rights, or gives them to others, is an error.
func (c *Client) Bind(ctx context.Context, namespace, name string, labels map[string]any, clusterRole string, account Meta) error {
	resource := c.api.Resource(roleBindings).Namespace(namespace)
	role := map[string]any{"apiGroup": rbacGroup, "kind": "ClusterRole", "name": clusterRole}
	subjects := []any{map[string]any{"kind": "ServiceAccount", "namespace": account.Namespace, "name": account.Name}}
	err := create(ctx, resource, rbacGroup+"/v1", "RoleBinding", Object{"metadata": map[string]any{"name": name, "labels": labels}, "roleRef": role, "subjects": subjects})
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	existing, err := resource.Get(ctx, name, metav1.GetOptions{})
	if err == nil && (!reflect.DeepEqual(existing.Object["roleRef"], any(role)) || !reflect.DeepEqual(existing.Object["subjects"], any(subjects))) {
		err = fmt.Errorf("it exists with the role %v and the subjects %v: delete it, if nothing else needs it", existing.Object["roleRef"], existing.Object["subjects"])
	}
	return err
}

// Unbind deletes a RoleBinding. It succeeds if there is none.
func (c *Client) Unbind(ctx context.Context, namespace, name string) error {
	return absent(c.api.Resource(roleBindings).Namespace(namespace).Delete(ctx, name, metav1.DeleteOptions{}))
}
