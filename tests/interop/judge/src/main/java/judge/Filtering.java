package judge;

import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.filter.FilterFactory;
import org.apache.rocketmq.filter.expression.EvaluationContext;
import org.apache.rocketmq.filter.expression.Expression;

/** What a broker's SQL92 filter says of property sets. 4.9.4 is the last of 4.9 whose filter is published. */
final class Filtering {
    private Filtering() {
    }

    static Row of(JSONObject request) {
        List<Object> verdicts = new ArrayList<>();
        for (Object each : request.getJSONArray("cases")) {
            JSONObject one = (JSONObject) each;
            verdicts.add(verdicts(one.getString("sql"), one.getJSONArray("sets")));
        }
        return Row.of("verdicts", verdicts);
    }

    private static List<Boolean> verdicts(String sql, JSONArray sets) {
        Expression compiled;
        try {
            compiled = FilterFactory.INSTANCE.get("SQL92").compile(sql);
        } catch (Throwable refused) {
            return null;
        }
        List<Boolean> verdicts = new ArrayList<>();
        for (Object set : sets) {
            verdicts.add(matches(compiled, (JSONObject) set));
        }
        return verdicts;
    }

    /** As the broker's ExpressionMessageFilter: what throws does not match. */
    private static boolean matches(Expression compiled, JSONObject properties) {
        EvaluationContext context = new EvaluationContext() {
            @Override
            public Object get(String name) {
                return properties.get(name);
            }

            @Override
            public Map<String, Object> keyValues() {
                return properties;
            }
        };
        try {
            Object verdict = compiled.evaluate(context);
            return verdict instanceof Boolean && (Boolean) verdict;
        } catch (Throwable thrown) {
            return false;
        }
    }
}
